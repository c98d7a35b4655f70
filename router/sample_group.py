"""The samples of a request that share its attempts."""

from dataclasses import dataclass, field, replace

from router.failover import History
from router.sample_run import SampleRun
from router.sampling_options import SamplingOptions
from router.submission import Share


@dataclass(frozen=True, slots=True, eq=False)
class SampleGroup:
    """Carried on by one attempt after the other, from the tokens that are there.

    All samples of a request begin as one group: one prefill, one hand-off. Those that have tokens when its
    attempt fails go on alone, each from its own.

    Attributes:
        samples: with numbers one after the other; if they are several, none has a token.
        history: of its attempts.
    """

    samples: tuple[SampleRun, ...]
    history: History = field(default_factory=History)

    @property
    def num_generated(self) -> int:
        """Of each sample."""
        return len(self.samples[0].generated)

    def share(self, options: SamplingOptions, prompt_logprobs: int | None) -> Share:
        """What the next attempt is to bring.

        Args:
            options: the request's.
            prompt_logprobs: what of them has not come.
        """
        numbers = range(self.samples[0].number, self.samples[-1].number + 1)
        if (options.n, options.prompt_logprobs) != (len(numbers), prompt_logprobs):
            options = replace(options, n=len(numbers), prompt_logprobs=prompt_logprobs)
        return Share(numbers, tuple(self.samples[0].generated), options)

    def after(self, history: History) -> "list[SampleGroup]":
        """What goes on after a failed attempt: the samples without an end."""
        if all(not sample.generated and sample.end is None for sample in self.samples):
            return [SampleGroup(self.samples, history)]
        return [SampleGroup((sample,), history) for sample in self.samples if sample.end is None]
