"""The time that messages take between two clusters: half a round trip each way, and jitter back."""

from random import Random

from prfaas.sim.events import Action, Events


class RoundTrip:
    """Calls actions when a message that leaves now is there.

    Jitter is all that is drawn at random in a run, from `seed`.
    """

    def __init__(self, events: Events, *, rtt_s: float, jitter_s: float, seed: int) -> None:
        self._events = events
        self._half_s = rtt_s / 2
        self._jitter_s = jitter_s
        self._random = Random(seed)

    def there(self, action: Action) -> None:
        """Do it at a PrfaaS cluster, once it hears of it."""
        self._later(self._half_s, action)

    def back(self, action: Action) -> None:
        """Do it here, once it is heard of here."""
        jitter_s = self._random.expovariate(1 / self._jitter_s) if self._jitter_s else 0.0
        self._later(self._half_s + jitter_s, action)

    def _later(self, delay_s: float, action: Action) -> None:
        if delay_s > 0:
            self._events.after(delay_s, action)
        else:
            action()
