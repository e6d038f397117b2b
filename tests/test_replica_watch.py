"""The process' own knowledge of replicas: who runs, and who is passed over for a while."""

import pickle
import threading

import pytest

from serve_app.replica_watch import WATCH, ReplicaWatch


def test_nothing_is_known_before_serve_has_spoken() -> None:
    """None is not the empty set: nobody has said yet that there are no replicas."""
    watch = ReplicaWatch()
    assert watch.running("chat") is None
    watch.update("chat", [])
    assert watch.running("chat") == frozenset()
    assert watch.running("other") is None


def test_subscribers_hear_each_change_once_and_of_their_own_application() -> None:
    """The new set, in order; not what is the same again, nor another application's; nothing after the end."""
    watch = ReplicaWatch()
    heard: list[frozenset[str]] = []
    unsubscribe = watch.subscribe("chat", heard.append)
    for ids in (["a"], ["a", "b"], ["b", "a"], ["b"]):
        watch.update("chat", ids)
    watch.update("other", ["x"])
    unsubscribe()
    watch.update("chat", [])
    assert heard == [{"a"}, {"a", "b"}, {"b"}]
    unsubscribe()  # twice does no harm


def test_a_listener_that_fails_or_leaves_stops_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """Serve's router runs the callbacks: it and the other listeners go on."""
    watch = ReplicaWatch()
    heard: list[frozenset[str]] = []

    def once(ids: frozenset[str]) -> None:
        leave()
        raise RuntimeError("this listener is broken")

    leave = watch.subscribe("chat", once)
    watch.subscribe("chat", heard.append)
    watch.update("chat", ["a"])
    watch.update("chat", ["b"])
    assert heard == [{"a"}, {"b"}]
    assert caplog.text.count("a listener to the replicas of chat failed") == 1


def test_shunning_ends_by_itself() -> None:
    """Until its time, of that replica alone; a later mark replaces the earlier one."""
    now = 100.0
    watch = ReplicaWatch(clock=lambda: now)
    assert not watch.is_shunned("chat", "a")
    watch.shun("chat", "a", until=103.0)
    assert watch.is_shunned("chat", "a")
    assert not watch.is_shunned("chat", "b")
    assert not watch.is_shunned("other", "a")
    now = 103.0
    assert not watch.is_shunned("chat", "a")
    watch.shun("chat", "b", until=110.0)
    assert list(watch._shunned) == [("chat", "b")], "marks that ended are forgotten"
    watch.shun("chat", "b", until=now)
    assert not watch.is_shunned("chat", "b")


def test_there_is_one_in_each_process() -> None:
    """Serve pickles deployments with the globals that they use: a copy that hears nothing must not come of it."""
    assert pickle.loads(pickle.dumps(WATCH)) is WATCH
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(ReplicaWatch())


def test_many_threads() -> None:
    """Writers, readers and subscribers in threads of their own: nothing is lost, nothing raises."""
    watch = ReplicaWatch()
    heard: list[frozenset[str]] = []
    watch.subscribe("chat", heard.append)

    def work(number: int) -> None:
        for i in range(300):
            unsubscribe = watch.subscribe("chat", lambda _ids: None)
            watch.update("chat", [f"{number}-{i}"])
            watch.shun("chat", f"{number}-{i}", until=1e18)
            watch.is_shunned("chat", "other")
            unsubscribe()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 4 * 300
    assert heard[-1] == watch.running("chat")
    assert all(watch.is_shunned("chat", f"{n}-{i}") for n in range(4) for i in range(300))
