"""`prfaas chat`: a conversation with a running node."""

import click

from prfaas.cli.ranges import FiniteRange


@click.command(short_help="Talk to a running node.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="A pd node.")
@click.option("--system", metavar="TEXT", help="A system message that opens the conversation.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--temperature", type=FiniteRange(0, 2), default=0.7, show_default=True)
def chat(url: str, system: str | None, max_tokens: int, temperature: float) -> None:
    """Talk to a running node; an empty line or Ctrl-D ends it.

    Below each answer stands where its prompt was prefilled. PRFAAS_API_KEY is sent if it is set.
    """
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} is no http:// or https:// address", param_hint="--url")
    from prfaas.cli.conversation import print_answer, served_model  # urllib is slow to import

    settings = {"model": served_model(url), "max_tokens": max_tokens, "temperature": temperature}
    conversation = [{"role": "system", "content": system}] if system else []
    while line := _read_line():
        conversation.append({"role": "user", "content": line})
        answer, story = print_answer(url, {"messages": conversation, **settings})
        conversation.append({"role": "assistant", "content": answer})
        click.secho(story, dim=True, err=True)


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        click.echo(err=True)
        return ""
