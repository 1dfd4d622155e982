"""A conversation as the one text that the model continues."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from prfaas.clock import Clock, wall_s
from prfaas.errors import BadRequest, ConfigError
from prfaas.text.messages import Message, prepare_messages
from prfaas.text.plain_template import PLAIN_FORMAT, PLAIN_STOP_STRINGS, render_plain
from prfaas.text.tokenizer import read_json, token_name

MAX_RENDERED_CHARACTERS = 64 << 20
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
"""What a template can raise on messages it was not made for: `None + str`, a key it expects, its own words."""

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """One model's way of writing a conversation. Safe to use from several threads.

    Attributes:
        stop_strings: strings that end an answer besides the request's own.
        is_plain: the checkpoint has no template, so a plain transcript stands in.
        adds_bos: the template itself decides whether the text starts with the beginning-of-sequence
            token: encode its text with `add_bos=not adds_bos`.
        takes_tools: the template has a place for tool definitions.
        fingerprint: sha256 of the template, hexadecimal.
    """

    def __init__(
        self, source: str | None, *, tokens: Mapping[str, str] | None = None, wall: Clock = wall_s
    ) -> None:
        """Compile a Jinja template; None is the plain transcript. `tokens` are names such as bos_token.

        Raises:
            ConfigError: the template is not valid.
        """
        self._source = source
        self._tokens = dict(tokens or {})
        self.is_plain = source is None
        self.adds_bos = not self.is_plain
        self.stop_strings = PLAIN_STOP_STRINGS if source is None else ()
        identity = f"plain {PLAIN_FORMAT}" if source is None else f"jinja {source}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self.takes_tools = False
        self._template: jinja2.Template | None = None
        if source is not None:
            environment = _environment(wall)
            try:
                self._template = environment.from_string(source)
                names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            except (jinja2.TemplateError, RecursionError) as error:
                line = getattr(error, "lineno", None)
                raise ConfigError(
                    f"the chat template is not valid, line {line}: {error}"
                ) from error
            self.takes_tools = "tools" in names

    @classmethod
    def load(cls, model_dir: Path, override: Path | None = None) -> "ChatTemplate":
        """Return the template of a checkpoint directory, or of the file `override`.

        The checkpoint's is chat_template.jinja, else the field of tokenizer_config.json (of several named
        ones, "default"), else the plain transcript.

        Raises:
            ConfigError: a file cannot be read or its template is not valid; the message names the file.
        """
        settings = read_json(model_dir / "tokenizer_config.json")
        tokens = {
            key: name for key in _TOKENS if (name := token_name(settings.get(key))) is not None
        }
        path = override or model_dir / "chat_template.jinja"
        if override is not None or path.exists():
            try:
                source: str | None = path.read_text("utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot read the chat template {path}: {error}") from error
        else:
            path = model_dir / "tokenizer_config.json"
            source = _default_template(settings.get("chat_template"), path)
        try:
            return cls(source, tokens=tokens)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """Return the text of the conversation, ready for the answer to follow.

        Messages are OpenAI's: `content` is a string, a list of text parts, or null.

        Raises:
            BadRequest: the template refuses the conversation, with its own words and the first message
                that it refuses; or tools are given and it has no place for them.
        """
        if tools and not self.takes_tools:
            raise BadRequest("this model's chat template has no place for tools", param="tools")
        if self._template is None or self._source is None:
            return render_plain(messages, add_generation_prompt=add_generation_prompt)
        prepared = prepare_messages(messages, self._source)
        try:
            return self._render(prepared, tools, add_generation_prompt)
        except _RENDER_ERRORS as error:
            index = self._first_refused(prepared, tools)
            raise BadRequest(
                f"messages[{index}] does not fit the model's chat template: {error}",
                param=f"messages[{index}]",
            ) from error

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
    ) -> str:
        assert self._template is not None
        pieces: list[str] = []
        num_characters = 0
        for piece in self._template.generate(
            messages=messages,
            tools=tools or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._tokens,
        ):
            num_characters += len(piece)
            if num_characters > MAX_RENDERED_CHARACTERS:
                raise ValueError(f"the text has over {MAX_RENDERED_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _first_refused(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
    ) -> int:
        """Return an index such that the messages before it are accepted and those up to it are not.

        By bisection: a refused conversation costs a client's request few renderings, however long it is.
        """
        num_accepted, num_refused = 0, max(1, len(messages))
        while num_refused - num_accepted > 1:
            middle = (num_accepted + num_refused) // 2
            try:
                self._render(messages[:middle], tools, add_generation_prompt=False)
                num_accepted = middle
            except _RENDER_ERRORS:
                num_refused = middle
        return num_refused - 1


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks an assistant's tokens for training; here its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(wall: Clock) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the environment that checkpoints' templates are written for, that of transformers."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def strftime_now(form: str) -> str:
        return datetime.fromtimestamp(wall(), tz=UTC).astimezone().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _default_template(setting: object, path: Path) -> str | None:
    """Return the template in a field of tokenizer_config.json: one, or several with names."""
    if setting is None or isinstance(setting, str):
        return setting
    if isinstance(setting, list):
        for named in setting:
            if isinstance(named, Mapping) and named.get("name") == "default":
                template = named.get("template")
                if isinstance(template, str):
                    return template
    raise ConfigError(
        f"{path} has a chat_template that is neither a text nor a list with a default"
    )
