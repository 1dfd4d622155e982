"""The transcript for base models, which were trained on documents and know no turn marks."""

from collections.abc import Sequence

from prfaas.errors import BadRequest
from prfaas.text.messages import Message, calls_text, content_text, tool_calls

PLAIN_FORMAT = "1: Question / Answer"
"""Names the layout below; peers with another one differ in fingerprint."""

PLAIN_STOP_STRINGS = ("\n\nQuestion:", "\nQuestion:")
"""The model goes on with the next question; the longer one takes the blank line away too."""


def render_plain(messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    r"""Return the conversation as `Question: ...\nAnswer: ...` paragraphs.

    System and developer messages are paragraphs where they stand, which is first as a rule. The results
    of tools come between the question and the next answer.

    Raises:
        BadRequest: a message has an unknown role or a content that is no text.
    """
    lines: list[str] = []
    for index, message in enumerate(messages):
        text = content_text(message, index).strip()
        match message.get("role"):
            case "user":
                lines.append(f"Question: {text}\n")
            case "assistant":
                answer = "\n".join(filter(None, [text, calls_text(tool_calls(message))]))
                lines.append(f"Answer: {answer}".rstrip() + "\n\n")
            case "tool" | "function":
                lines.append(f"Result: {text}\n")
            case "system" | "developer":
                lines.append(f"{text}\n\n" if text else "")
            case role:
                raise BadRequest(
                    f"messages[{index}].role is {role!r}, not one of a conversation's",
                    param=f"messages[{index}].role",
                )
    if add_generation_prompt:
        lines.append("Answer:")
    return "".join(lines)
