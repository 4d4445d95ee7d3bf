import threading
import time
from pathlib import Path

from farandole.node.base.identity import locked
from farandole.node.base.settings import NodeSettings
from farandole.node.own_loop.child_node import await_node


def test_a_node_that_starts_is_waited_for(tmp_path: Path) -> None:
    """Otherwise a loop beside it would start a second node, in another folder."""
    holds, events = threading.Event(), list[str]()

    def start() -> None:  # and fail
        with locked(NodeSettings(home=tmp_path).lock):
            holds.set()
            time.sleep(0.5)  # longer than the time between two looks
            events.append("ended")

    thread = threading.Thread(target=start)
    thread.start()
    assert holds.wait(60)
    assert await_node(tmp_path) == ""
    events.append("waited")
    thread.join()

    assert events == ["ended", "waited"]


def test_a_folder_without_a_node_is_not_waited_for(tmp_path: Path) -> None:
    assert await_node(tmp_path / "new") == ""
    with locked(NodeSettings(home=tmp_path).lock):
        pass
    assert await_node(tmp_path) == ""
    assert not (tmp_path / "new").exists()
