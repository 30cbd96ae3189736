"""Episodes that do not come to their end: their environment fails, or nobody wants them now."""

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from trimtab.agents.play import Play, Stage
from trimtab.envs.replies import Broken

if TYPE_CHECKING:
    from trimtab.agents.session import AgentSession


class Mishaps:
    """Of a session's episodes."""

    def __init__(self, session: "AgentSession"):
        self.session = session

    def broken(self, play: Play, reply: Broken) -> None:
        self.leave_engine([play])
        if reply.innocent:  # another instance is played what this one knew
            play.replayed, play.stage = 0, Stage.OPENING
            self.session.open(play)
            return
        play.failures += 1
        if play.failures <= self.session.engine.settings.retries:
            play.forget()
            self.session.open(play)
            return
        self.session.hand_over(play, "failed", reply.words)
        for other in [other for other in self.session.under_way.values() if other.request == play.request]:
            self.leave_engine([other])
            self.session.engine.pool.drop(other.number)
            self.session.hand_over(other, "failed")

    def abort(self, requests: Collection[int]) -> None:
        gone = [play for play in self.session.under_way.values() if play.request in requests]
        if gone:
            self.leave_engine(gone)
            for play in gone:
                if play.stage in (Stage.OPENING, Stage.REPLAYING):
                    self.session.engine.pool.drop(play.number)
                self.session.hand_over(play, "abort")

    def leave_engine(self, plays: list[Play]) -> None:
        """Take what of their turns is written already."""
        written = [play for play in plays if play.now.request is not None]
        if not written:
            return
        parts = self.session.inner.drafts()
        self.session.inner.abort([play.now.request for play in written if play.now.request is not None])
        for play in written:
            request = play.now.request
            assert request is not None
            del self.session.writing[request]
            part = parts[request][0]
            play.now = replace(play.now, request=None, part=part if len(part.tokens) else None)
