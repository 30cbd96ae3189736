"""Agents in threads of this process, in place of a pool of others."""

import queue
import threading
from collections.abc import Callable

from trimtab.envs.environment_pool import EndReply, FailureReply


class Agents:
    """Runs `play(task, client)`, where `client(messages, **fields)` asks the server and gives the reply."""

    def __init__(self, play: Callable[..., float]):
        self.play, self.replies = play, queue.SimpleQueue()
        self.dropped, self.closed, self.threads = set(), False, []

    def run(self, episode, task, *, base_url, api_key, model):
        def run():
            try:
                reward = self.play(task, base_url, api_key, model)
                self.replies.put(EndReply(episode, reward, {"own": 1.0}, 0.25))
            except Exception as error:
                self.replies.put(FailureReply(episode, str(error), innocent=getattr(error, "innocent", False)))

        thread = threading.Thread(target=run, daemon=True)
        self.threads.append(thread)
        thread.start()

    def drop(self, episode):
        self.dropped.add(episode)

    def poll(self, seconds):
        found = []
        while not self.replies.empty():
            found.append(self.replies.get())
        return [reply for reply in found if reply.episode not in self.dropped]

    def close(self):
        self.closed = True
