"""From checked requests to an HTTP answer: whole or streamed, counted and recorded."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from prfaas.clock import Clock
from prfaas.errors import PrfaasError
from prfaas.log import get_logger
from prfaas.server.choice_text import ChoiceText
from prfaas.server.failures import error_event, failure_reason
from prfaas.server.merging import MergedGenerations, generate_all
from prfaas.server.metrics import Metrics
from prfaas.server.node import Generation, ServingNode
from prfaas.server.openai.answers import AnswerHead, Json, Piece, to_json, usage_body
from prfaas.server.records import RecordRing
from prfaas.server.sse import EventStream
from prfaas.server.story_counts import StoryCounts
from prfaas.types import Request, RequestRecord, TokenEvent

MAX_REASON_CHARS = 200

log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, checked and tokenised: one engine request for each of its prompts."""

    head: AnswerHead
    requests: tuple[Request, ...]
    echoes: tuple[str, ...]
    """What each prompt's answers begin with: the prompt, or nothing."""
    stops: tuple[str, ...]
    is_stream: bool
    includes_usage: bool
    has_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one event adds to the answer."""

    index: int
    """The choice, over all prompts."""
    piece: Piece
    is_first: bool


class Answer:
    """The state of one answer while its events come in."""

    def __init__(self, job: Job, node: ServingNode, merged: MergedGenerations) -> None:
        self._job = job
        self._merged = merged
        self._num_choices = job.requests[0].num_choices
        self.choices = [
            ChoiceText(
                node.tokenizer,
                stops=job.stops,
                stop_token_ids=request.sampling.stop_token_ids,
                first_offset=len(echo),
            )
            for request, echo in zip(job.requests, job.echoes, strict=True)
            for _ in range(self._num_choices)
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens drawn for all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    def push(self, prompt_index: int, event: TokenEvent) -> Step | None:
        """Return what `event` adds; None if its choice has ended by a stop string."""
        index = prompt_index * self._num_choices + event.choice_index
        choice = self.choices[index]
        if choice.finish_reason is not None:
            return None  # the event was under way when the stop string was found
        is_first = choice.num_tokens == 0
        piece = choice.push(event)
        generation = self._merged.generations[prompt_index]
        assert generation is not None
        if piece.finish_reason is not None and event.finish_reason is None:
            generation.stop_choice(event.choice_index)
        self._note(generation, prompt_index, event.choice_index)
        if is_first:
            piece = piece.after(self._job.echoes[prompt_index])
        return Step(index=index, piece=piece, is_first=is_first)

    def _note(self, generation: Generation, prompt_index: int, choice_index: int) -> None:
        first = prompt_index * self._num_choices
        choices = self.choices[first : first + self._num_choices]
        generation.record.completion_tokens = sum(choice.num_tokens for choice in choices)
        reason = choices[choice_index].finish_reason
        if reason is not None:
            generation.record.finish_reasons[choice_index] = reason

    def records(self) -> list[RequestRecord]:
        """Return the stories of the prompts that have begun."""
        return [generation.record for generation in self._merged.generations if generation]

    def usage(self) -> Json:
        """Return `usage` as it stands."""
        return usage_body(self.records(), self.num_tokens)


class Answerer:
    """Answers jobs on one node."""

    def __init__(
        self,
        *,
        node: ServingNode,
        metrics: Metrics,
        records: RecordRing,
        clock: Clock,
        write_timeout_s: float,
        heartbeat_s: float | None,
    ) -> None:
        self._node = node
        self._metrics = metrics
        self._records = records
        self._clock = clock
        self._write_timeout_s = write_timeout_s
        self._heartbeat_s = heartbeat_s

    async def answer(self, http: web.Request, job: Job) -> web.StreamResponse:
        """Return the answer, already sent if it is a stream.

        Nothing is sent before the first event, so that what fails until then is an HTTP status (a
        stream with a heartbeat may begin with that). Whatever ends this ends the work.

        Raises:
            PrfaasError: the request failed and no byte of the answer has been sent.
        """
        story = _Story(
            StoryCounts(
                self._metrics,
                self._records,
                self._clock,
                arrival_s=job.requests[0].arrival_s,
            )
        )
        try:
            async with generate_all(self._node, job.requests) as merged:
                story.answer = answer = Answer(job, self._node, merged)
                if job.is_stream:
                    return await self._stream(http, job, answer, merged, story)
                return await self._whole(job, answer, merged, story)
        except asyncio.CancelledError:
            story.failed("cancelled")
            raise
        except Exception as error:
            story.failed(failure_reason(error))
            raise

    async def _whole(
        self, job: Job, answer: Answer, merged: MergedGenerations, story: "_Story"
    ) -> web.StreamResponse:
        pieces: list[list[Piece]] = [[] for _ in answer.choices]
        while (item := await merged.next()) is not None:
            step = story.step(*item)
            if step is not None:
                pieces[step.index].append(step.piece)
        choices = [
            job.head.choice(index, Piece.joined(parts), has_logprobs=job.has_logprobs)
            for index, parts in enumerate(pieces)
        ]
        story.finished()
        return web.Response(
            body=to_json(job.head.whole(choices, answer.usage())),
            content_type="application/json",
            headers=story_headers(answer.records()),
        )

    async def _stream(
        self,
        http: web.Request,
        job: Job,
        answer: Answer,
        merged: MergedGenerations,
        story: "_Story",
    ) -> web.StreamResponse:
        stream = EventStream(http, write_timeout_s=self._write_timeout_s)
        try:
            await self._send_steps(stream, job, answer, merged, story)
        except ConnectionError:  # nobody is there to be told
            story.failed("client_left")
        except Exception as error:
            if not stream.is_begun:
                raise
            if not isinstance(error, PrfaasError):
                log.exception("request.crashed")
            story.failed(failure_reason(error))
            stream.add(error_event(error))
            await stream.end()
        return stream.response

    async def _send_steps(
        self,
        stream: EventStream,
        job: Job,
        answer: Answer,
        merged: MergedGenerations,
        story: "_Story",
    ) -> None:
        rest: Json = {"usage": None} if job.includes_usage else {}
        while (item := await self._next(merged, stream)) is not None:
            step = story.step(*item)
            if step is None or not (step.is_first or step.piece):
                continue
            if not stream.is_begun:
                stream.response.headers.update(story_headers(answer.records()))
            choice = job.head.delta(
                step.index, step.piece, is_first=step.is_first, has_logprobs=job.has_logprobs
            )
            stream.add(job.head.chunk([choice], **rest))
            if stream.is_full:
                await stream.send()
        await stream.send()  # a client that does not take it has not got its answer
        story.finished()
        if job.includes_usage:
            stream.add(job.head.chunk([], usage=answer.usage()))
        await stream.end()

    async def _next(
        self, merged: MergedGenerations, stream: EventStream
    ) -> tuple[int, TokenEvent] | None:
        """Return the next event. No wait for it begins with text unsent; comment lines go out in it."""
        while not merged.has_next:
            await stream.send()
            if self._heartbeat_s is None:
                break
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    return await merged.next()
            except TimeoutError:
                await stream.comment()
        return await merged.next()


class _Story:
    """Counts one answer's steps as they are made of its events."""

    def __init__(self, counts: StoryCounts) -> None:
        self._counts = counts
        self.answer: Answer | None = None

    def step(self, prompt_index: int, event: TokenEvent) -> Step | None:
        assert self.answer is not None
        step = self.answer.push(prompt_index, event)
        if step is not None:
            self._counts.token(step.index, self.answer.records())
        return step

    def finished(self) -> None:
        assert self.answer is not None
        self._counts.finished(self.answer.records())

    def failed(self, reason: str) -> None:
        self._counts.failed([] if self.answer is None else self.answer.records(), reason)


def story_headers(records: Sequence[RequestRecord]) -> dict[str, str]:
    """Return the headers that say how the (first) prompt came to its KVCache."""
    if not records:
        return {}
    record = records[0]
    reason = "".join(char if " " <= char <= "~" else "?" for char in record.reason)
    headers = {
        "X-Prfaas-Route": record.route,
        "X-Prfaas-Reason": reason[:MAX_REASON_CHARS],
        "X-Prfaas-Tokens-Reused": str(record.tokens_reused),
        "X-Prfaas-Tokens-Local": str(record.tokens_local),
        "X-Prfaas-Tokens-Remote": str(record.tokens_remote),
        "X-Prfaas-Bytes-Received": str(record.bytes_received),
    }
    if record.node is not None:
        headers["X-Prfaas-Node"] = record.node
    return headers
