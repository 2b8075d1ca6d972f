"""The thread that serves an LLM's requests."""

import os
import threading

from ddtree.runtime.errors import QueueFullError, RequestError
from ddtree.runtime.results import GenerationResult
from ddtree.runtime.scheduler import Drafting, Scheduler


class Worker:
    """Runs a scheduler in a thread of its own, which starts with the first request and sleeps while there is none.

    Args:
        scheduler: its thread's alone from then on, with the engine.
        slots: the most sequences that have a slot.
        max_queue_size: the most sequences that wait for one.

    Attributes:
        capacity: the most sequences at once, running and waiting.
    """

    def __init__(self, scheduler: Scheduler, slots: int, max_queue_size: int):
        self._scheduler = scheduler
        self._slots, self._max_queue_size = slots, max_queue_size
        self.capacity = slots + max_queue_size
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        lock = threading.RLock()  # reentrant: a finalizer that shuts down may run wherever memory is allocated
        self._work = threading.Condition(lock)  # there is something to do
        self._room = threading.Condition(lock)  # there may be room in the queue
        # Under the lock:
        self._arrived: list[tuple[GenerationResult, Drafting]] = []
        self._aborted: list[GenerationResult] = []
        self._closed = self._drain = False
        self._ending = "been shut down"

    def submit(self, result: GenerationResult, drafting: Drafting, *, wait: bool) -> None:
        """Hand over a request, of at most ``capacity`` sequences. If the queue is full, ``wait`` until it is not.

        Raises:
            QueueFullError: the queue is full.
            RequestError: the thread has been shut down, or would wait for itself, or is another process's.
        """
        if wait:
            self.check_may_wait()
        if os.getpid() != self._process:  # a fork has neither the thread nor, perhaps, its lock
            raise RequestError(
                f"this LLM was opened in process {self._process}, and this is a fork of it (open one in each process)"
            )
        count = len(result.sequences)
        with self._work:
            if wait:
                self._room.wait_for(lambda: self._closed or self._unfinished() + count <= self.capacity)
            if self._closed:
                raise RequestError(f"this LLM has {self._ending} (open another)")
            if self._unfinished() + count > self.capacity:
                raise QueueFullError(
                    f"the queue is full: {max(self._unfinished() - self._slots, 0)} of max_queue_size "
                    f"{self._max_queue_size} wait (try again later, or open the LLM with a larger max_queue_size)"
                )
            self._arrived.append((result, drafting))
            if self._thread is None:
                # A daemon, so that a program may end without shutdown(): LLM's finalizer then ends the thread, at exit
                # as well, which would wait for any other thread first.
                self._thread = threading.Thread(target=self._run, name="ddtree worker", daemon=True)
                self._thread.start()
            self._work.notify()

    def abort(self, result: GenerationResult) -> None:
        """End a request before the next pass."""
        if os.getpid() != self._process:
            return
        with self._work:
            self._aborted.append(result)
            self._work.notify()

    def check_may_wait(self) -> None:
        """Raise RequestError in the worker's own thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise RequestError(
                "waiting in on_round for the thread that calls it would never end (wait in another thread)"
            )

    def shutdown(self, *, drain: bool = False) -> None:
        """Take no more requests, cancel those that there are, or with ``drain`` finish them, and end the thread."""
        if os.getpid() != self._process:
            return
        with self._work:
            self._closed, self._drain = True, drain
            self._work.notify()
            self._room.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _unfinished(self) -> int:
        return self._scheduler.unfinished + sum(len(result.sequences) for result, _ in self._arrived)

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._scheduler.step()
        except BaseException as error:  # a fault of the scheduler's, or an interrupt; nobody waits in vain for all that
            self._ending = f"ended with {type(error).__name__}: {' '.join(str(error).split())}"
            self._close()
            self._scheduler.lose_all(error)
            raise
        self._close()
        self._scheduler.abort_all()

    def _take_orders(self) -> bool:
        """Wait until there is something to do, and take it in. False if the thread is to end."""
        with self._work:
            self._room.notify_all()  # the last step may have ended some
            while not (self._closed or self._arrived or self._aborted or self._scheduler.unfinished):
                self._work.wait()
            self._add_arrived()
            aborted, self._aborted = self._aborted, []
        for result in aborted:
            self._scheduler.abort(result)
        return not self._closed or (self._drain and self._scheduler.unfinished > 0)

    def _close(self) -> None:
        with self._work:
            self._closed = True
            self._add_arrived()
            self._room.notify_all()

    def _add_arrived(self) -> None:
        for result, drafting in self._arrived:
            self._scheduler.add(result, drafting)
        self._arrived.clear()
