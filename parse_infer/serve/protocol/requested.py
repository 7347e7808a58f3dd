"""The answers that one request needs, before its prompts are rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parse_infer.models.prompts import Prompt
from parse_infer.serve.errors import ApiError
from parse_infer.serve.runner import InvalidRequest, Job, Runner, TokenPrompt
from parse_infer.settings import GenerationSettings


@dataclass(frozen=True)
class RequestedAnswers:
    """One answer to each prompt with each of the settings. The other fields are those of `Job`."""

    prompts: Sequence[Prompt | TokenPrompt]
    settings: Sequence[GenerationSettings]
    draft_text: str | None = None
    alone: bool = False
    watched: bool = True

    def __len__(self) -> int:
        return len(self.prompts) * len(self.settings)

    async def jobs(self, backend: Runner) -> list[tuple[Job, int]]:
        """Render each prompt once; return the jobs with their numbers of prompt tokens. Raises ApiError."""
        found = []
        for prompt in self.prompts:
            try:
                rendered, ids = await backend.render(prompt, drafted=not self.alone and self.draft_text is None)
            except InvalidRequest as error:
                code = "context_length_exceeded" if "window" in str(error) else "invalid_value"
                raise ApiError(400, str(error), code) from error
            tokens = len(ids)
            found += [
                (Job(rendered, settings, self.draft_text, self.alone, self.watched), tokens)
                for settings in self.settings
            ]
        return found
