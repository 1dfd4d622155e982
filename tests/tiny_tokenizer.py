"""The tokenizer of every tiny model, for tests that need no torch either."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from tests.tiny_configs import BOS_ID, VOCAB_SIZE

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
CORPUS = (
    "The capital of France is Paris, and the capital of Germany is Berlin.",
    "Long prompts are prefilled by a remote node; the local node decodes the answer.",
    "She sells sea shells by the sea shore, and the shells she sells are sea shells, I am sure.",
    "The quick brown fox jumps over the lazy dog while the other foxes are sleeping.",
    "Question: what is the largest planet of the solar system? Answer: Jupiter is the largest.",
    "Die schnelle Übertragung größerer Datenmengen benötigt genügend Bandbreite für alle.",
    "Les élèves étudient près de la fenêtre; où êtes-vous allés après le déjeuner d'été?",
    "Быстрая коричневая лиса прыгает через ленивую собаку. Это предложение для обучения.",
    "日本語の文章もあります。今日は良い天気ですね。東京は日本の首都です。",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, i))\n",
    "0 1 2 3 4 5 6 7 8 9 10 100 1000 2024 2025 3.14159 😀 🚀",
)


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE ids; encoding puts <bos> first."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        show_progress=False,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    return tokenizer
