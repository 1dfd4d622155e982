import pytest

from prfaas.errors import BadRequest
from prfaas.server.openai.requests import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_STOPS,
    ModelLimits,
    Settings,
    parse_chat,
    parse_completion,
    parse_model,
)

LIMITS = ModelLimits(vocab_size=100, eos_ids=(1, 2))
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "m", "prompt": "Hi"}


def chat(**fields: object) -> Settings:
    return parse_chat({**CHAT, **fields}, LIMITS, lambda: 77).settings


def text(**fields: object) -> Settings:
    return parse_completion({**TEXT, **fields}, LIMITS, lambda: 77).settings


def refused(**fields: object) -> str:
    """The param of the complaint about a chat."""
    with pytest.raises(BadRequest) as error:
        chat(**fields)
    assert error.value.status == 400
    return str(error.value.param)


def test_unset_fields_have_openais_defaults():
    settings = chat()
    sampling = settings.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, None, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0, 0)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1, ())
    assert (sampling.seed, sampling.num_logprobs) == (77, None)
    assert sampling.stop_token_ids == (1, 2)
    assert (settings.max_tokens, settings.stops, settings.num_choices) == (None, (), 1)
    assert not settings.is_stream
    assert not settings.includes_usage
    assert settings.cache_salt == b""
    assert text().max_tokens == 16


def test_every_sampling_field_arrives():
    sampling = chat(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=-1, frequency_penalty=2,
        repetition_penalty=1.2, logit_bias={"5": -100, "7": 3.5}, seed=9, logprobs=True,
        top_logprobs=3, stop_token_ids=[4],
    ).sampling  # fmt: skip
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5, 0.9, 40, 0.1,
    )  # fmt: skip
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 2)
    assert sampling.repetition_penalty == 1.2
    assert sampling.logit_bias == ((5, -100.0), (7, 3.5))
    assert (sampling.seed, sampling.num_logprobs) == (9, 3)
    assert sampling.stop_token_ids == (1, 2, 4)


@pytest.mark.parametrize("value", [0, -1])
def test_top_k_of_nothing_is_all(value):
    assert chat(top_k=value).sampling.top_k is None


def test_top_p_of_nothing_is_the_most_likely_token():
    sampling = chat(top_p=0, top_k=50).sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)


@pytest.mark.parametrize("value", [0, 0.0, 1e-9, 2])
def test_temperatures_down_to_zero_are_taken(value):
    assert chat(temperature=value).sampling.temperature == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", True),
        ("top_p", -0.1), ("top_p", 1.1), ("top_k", 1.5), ("top_k", -2), ("min_p", 2),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
        ("repetition_penalty", -1), ("seed", 1.5), ("seed", "1"), ("seed", 2**64), ("seed", -(2**63) - 1),
        ("n", 0), ("n", MAX_CHOICES + 1), ("n", "2"), ("stop", 5), ("stop", ""), ("stop", ["a", 5]),
        ("stop", ["x"] * (MAX_STOPS + 1)), ("stop", "x" * 5000), ("stop", {}), ("stop_token_ids", [100]),
        ("stop_token_ids", [True]), ("stop_token_ids", 5), ("ignore_eos", 1), ("stream", "yes"),
        ("logit_bias", []), ("logit_bias", {"100": 1}), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"²": 1}), ("logit_bias", {"9" * 5000: 1}), ("logit_bias", {str(i): 1 for i in range(2000)}),
        ("cache_salt", 5), ("cache_salt", ""), ("cache_salt", "x" * 257), ("logprobs", 1),
        ("response_format", {"type": "json_object"}), ("response_format", {"type": "json_schema"}),
        ("response_format", "text"), ("response_format", {}), ("modalities", ["text", "audio"]), ("modalities", "text"),
        ("audio", {"voice": "alloy"}), ("web_search_options", {}), ("functions", []),
        ("function_call", "auto"), ("reasoning_effort", "high"), ("verbosity", "low"), ("moderation", {}),
        ("chat_template", "{{ x }}"), ("chat_template_kwargs", {}), ("tokenizer", "x"), ("nonsense", 1),
        ("guided_json", {}), ("prompt", "Hi"), ("echo", True), ("suffix", "x"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_honoured_is_refused_by_name(name, value):
    assert refused(**{name: value}) == name


def test_a_bias_out_of_bounds_is_refused_by_its_token():
    assert refused(logit_bias={"5": 101}) == "logit_bias.5"
    assert refused(logit_bias={"5": "1"}) == "logit_bias.5"


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u"}, {"metadata": {"a": "b"}}, {"store": True}, {"service_tier": "auto"},
        {"safety_identifier": "s"}, {"prompt_cache_key": "k"}, {"parallel_tool_calls": False},
        {"prediction": {"type": "content", "content": "x"}}, {"response_format": {"type": "text"}},
        {"modalities": ["text"]}, {"stop": []}, {"stop": None}, {"n": None}, {"audio": None}, {"nonsense": None},
    ],
)  # fmt: skip
def test_what_does_no_harm_is_accepted(fields):
    assert chat(**fields).sampling == chat().sampling


@pytest.mark.parametrize("value", [21, -1, True, "5", 1.5])
def test_top_logprobs_are_from_0_to_20(value):
    assert refused(logprobs=True, top_logprobs=value) == "top_logprobs"


def test_top_logprobs_need_logprobs():
    assert refused(top_logprobs=5) == "top_logprobs"
    assert refused(logprobs=False, top_logprobs=5) == "top_logprobs"
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20


def test_stream_options_need_a_stream():
    assert refused(stream_options={"include_usage": True}) == "stream_options"
    assert refused(stream=True, stream_options={"x": 1}) == "stream_options.x"
    assert (
        refused(stream=True, stream_options={"include_usage": 1}) == "stream_options.include_usage"
    )
    assert chat(stream=True, stream_options={"include_usage": True}).includes_usage
    assert not chat(stream=True, stream_options={}).includes_usage


def test_seeds_are_taken_modulo_two_to_the_64():
    assert chat(seed=-1).sampling.seed == 2**64 - 1
    assert chat(seed=0).sampling.seed == 0


def test_a_limit_that_does_not_fit_the_context_is_named():
    settings = chat(max_tokens=10)
    fitting = settings.sampling_within(
        prompt_tokens=90, max_context_tokens=100, prompt_param="messages"
    )
    assert fitting.max_tokens == 10
    with pytest.raises(
        BadRequest, match=r"has 91 tokens and max_tokens is 10.* 100 tokens"
    ) as error:
        settings.sampling_within(prompt_tokens=91, max_context_tokens=100, prompt_param="messages")
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "max_tokens")


def test_an_unset_limit_is_the_room_that_is_left():
    def drawn(prompt_tokens: int) -> int:
        return chat().sampling_within(
            prompt_tokens=prompt_tokens, max_context_tokens=100, prompt_param="messages"
        ).max_tokens  # fmt: skip

    assert [drawn(1), drawn(99)] == [99, 1]
    for prompt_tokens in (100, 101):
        with pytest.raises(BadRequest, match=rf"has {prompt_tokens} tokens, .*100 tokens") as error:
            drawn(prompt_tokens)
        assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("Hi", ("Hi",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([5, 6], ((5, 6),)),
        ([[5], [6, 7]], ((5,), (6, 7))),
    ],
)
def test_prompts_come_in_four_forms(prompt, parsed):
    request = parse_completion({"model": "m", "prompt": prompt}, LIMITS, lambda: 0)
    assert request.prompts == parsed


@pytest.mark.parametrize(
    "prompt",
    [
        None, 5, {}, [], [[]], [None], ["a", 5], [5, "a"], [[5], "a"], ["a", [5]], [100], [-1], [True],
        [[5, 100]], ["a"] * (MAX_PROMPTS + 1),
    ],
)  # fmt: skip
def test_other_prompts_are_refused(prompt):
    with pytest.raises(BadRequest) as error:
        text(prompt=prompt)
    assert error.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"tools": []}, "tools"),
    ],
)
def test_what_completions_cannot_honour_is_refused_by_name(fields, param):
    with pytest.raises(BadRequest) as error:
        text(**fields)
    assert error.value.param == param


def test_completions_take_logprobs_as_a_number():
    assert text(logprobs=0).num_logprobs == 0
    assert text(logprobs=5).num_logprobs == 5
    assert text(best_of=2, n=2).num_choices == 2


def test_the_model_is_required_text():
    assert parse_model({"model": "m"}) == "m"
    bodies: list[dict[str, object]] = [
        {}, {"model": None}, {"model": ""}, {"model": 5}, {"model": "m" * 1000},
    ]  # fmt: skip
    for body in bodies:
        with pytest.raises(BadRequest) as error:
            parse_model(body)
        assert error.value.param == "model"
