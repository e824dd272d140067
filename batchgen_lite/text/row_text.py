"""One row's generated text: tokens in, text and the reason to stop out. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from batchgen_lite.runtime.interface import Finish
from batchgen_lite.sampling_params import SamplingParams
from batchgen_lite.text.detokenizer import Detokenizer
from batchgen_lite.text.reasoning import ReasoningSections, SplitText
from batchgen_lite.text.stop_strings import StopStrings
from batchgen_lite.text.tokenizer import Tokenizer


class RowText:
    """Detokenises one row and decides when it ends. A function of its tokens alone: feeding the tokens of an
    interrupted run again, one by one or as ``prior_ids``, gives exactly the same state.

    Rules, as vLLM has them: EOS (unless ``ignore_eos``) and ``stop_token_ids`` end the row and are counted among its
    tokens but add no text (unless ``include_stop_str_in_output``); a stop string ends it at once, and the text is cut
    before it (or behind it); neither counts before ``min_tokens`` tokens. EOS goes before length.

    Args:
        stop_ids: the model's EOS ids (see ``tokenizer.stop_ids``), to which ``params.stop_token_ids`` are added.
        prompt_ids: the prompt, from which it is seen whether the template already opened a reasoning block.
        reasoning: "keep" leaves the text as it is, "split" moves reasoning to ``reasoning``, "drop" removes it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stop_ids: Collection[int],
        prompt_ids: Sequence[int] = (),
        prior_ids: Sequence[int] = (),
        *,
        reasoning: str = "keep",
    ) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(stop_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._stops = StopStrings(params.stop)
        self._detokenizer = Detokenizer(tokenizer, skip_special=params.skip_special_tokens)
        self._sections = ReasoningSections(tokenizer, prompt_ids) if reasoning != "keep" else None
        self._drop_reasoning = reasoning == "drop"
        self._raw = ""  # certain text, stop strings and reasoning included
        self._exempt = 0  # characters in which no stop string may end, because of min_tokens
        self._searched = 0
        self._taken = 0
        self._split: SplitText | None = None
        self.token_ids: list[int] = []
        self.finish: Finish | None = None
        for token_id in prior_ids:
            self.accept(token_id)

    def accept(self, token_id: int) -> Finish | None:
        """Take one generated token. Returns why the row ends, None if it goes on. Raises ValueError after its end."""
        if self.finish is not None:
            raise ValueError("the row has already ended")
        self.token_ids.append(token_id)
        count = len(self.token_ids)
        may_stop = count > self._params.min_tokens
        if may_stop and (token_id in self._eos or token_id in self._stop_ids):
            if self._params.include_stop_str_in_output:
                self._push(token_id)
            reason = None if token_id in self._eos else token_id
            return self._end(Finish("stop", reason))
        self._push(token_id)
        if (finish := self._check_stop_strings(may_stop)) is not None:
            return finish
        return self._end(Finish("length")) if count >= self._params.max_tokens else None

    @property
    def text(self) -> str:
        """The row's text: final once the row has ended; before, what no later token can change."""
        if self._split is not None:
            return self._split.text
        return self._raw if self.finish is not None else self._raw[: self._stops.safe_length(self._raw)]

    @property
    def reasoning(self) -> str | None:
        """The reasoning, at the end of a row whose reasoning is split off; None if there was none."""
        return None if self._split is None or self._drop_reasoning else self._split.reasoning

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends this row; the sampler suppresses them before min_tokens (SequenceRequest.stop_ids)."""
        return self._eos | self._stop_ids

    def take_text(self) -> str:
        """What ``text`` has gained since the last call, for streaming. Reasoning is not split off in a stream."""
        text = self._raw if self.finish is not None else self.text
        new, self._taken = text[self._taken :], len(text)
        return new

    def _push(self, token_id: int) -> None:
        if self._sections is not None:
            self._sections.push(token_id, len(self._raw) + len(self._detokenizer.pending()))
        self._raw += self._detokenizer.push(token_id)

    def _check_stop_strings(self, may_stop: bool) -> Finish | None:
        if not self._stops:
            return None
        # Byte tokens held back may already be the stop string ("\n" is <0x0A> in Llama 2): if the row ends here,
        # nothing follows that could change them.
        text = self._raw + self._detokenizer.pending()
        if not may_stop:
            self._exempt = len(text)
            return None
        match = self._stops.find(text, max(self._exempt, self._searched))
        self._searched = len(self._raw)
        if match is None:
            return None
        self._raw = text[: match.end if self._params.include_stop_str_in_output else match.start]
        return self._end(Finish("stop", match.stop), flush=False)

    def _end(self, finish: Finish, *, flush: bool = True) -> Finish:
        if flush:
            self._raw += self._detokenizer.flush()
        self.finish = finish
        if self._sections is not None:
            self._split = self._sections.split(self._raw)
        return finish
