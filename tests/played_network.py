"""A network that a test plays, for a watchdog."""


class PlayedNetwork:
    """A network of functions: its first error, and what a poll does; without sockets, so that every wait polls."""

    def __init__(self, failure=str, poll=bool):
        self._failure, self.poll = failure, poll

    @property
    def failure(self):
        return self._failure()

    def awaited_sockets(self):
        return None
