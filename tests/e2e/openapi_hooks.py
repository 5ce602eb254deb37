"""A check for schemathesis (SCHEMATHESIS_HOOKS=tests.e2e.openapi_hooks): what the document calls a request is taken.

Its own one, `positive_data_acceptance`, is for schemas that say everything. Ours cannot say how many tokens a text has, nor
that one field needs another: answers for such reasons pass here, by their words, and no others.
"""

from __future__ import annotations

import re
from typing import Any

import schemathesis

BEYOND_A_SCHEMA = re.compile(
    "|".join(
        [
            r"^this model takes \d+ tokens",
            r"^(input|prompt|messages) has \d+ tokens, this model takes",
            r"^(input|prompt|messages) has no tokens",
            r"^(input|prompt) has token \d+, and the largest is",
            r"^(input|prompt|messages): .*UTF-8",
            r"^input has no mask",
            r"^\d+ prompts with \d+ answers each are more than",
            r"^best_of \d+ must be at least n",
            r"^echo has no log-probabilities",
            r"^top_logprobs needs logprobs: true",
            r"^stream_options needs stream: true",
            r"^max_tokens and max_completion_tokens differ",
            r"^min_tokens: \d+ is more than max_tokens",
            r"^(stop_ids|logit_bias): token \d+ is none of the model's",
            r"^chat_template_kwargs may not replace",
            r"^the chat template refuses these messages",
        ]
    )
)


@schemathesis.check
def requests_of_the_document_are_taken(ctx: Any, response: Any, case: Any) -> None:
    if response.status_code == 400 and case.meta is not None and case.meta.generation.mode.is_positive:
        said = response.json()["error"]["message"]
        if re.match("(prompt|input) must be a text", said) and re.search(
            rb"[0-9.]+(e[0-9+]+|\.0)", response.request.body or b""
        ):
            return  # token ids as 5.0, which is an integer to JSON Schema alone
        assert BEYOND_A_SCHEMA.search(said), f"refused, though the document allows it: {said}"
