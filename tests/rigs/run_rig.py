"""Values about a run on the hosts a and b, for tests of what judges and words them."""

from llama405b.contract.records import Metrics, NodeState, NodeStatus
from llama405b.spec.plan import Node, Plan
from llama405b_tools.agent.messages import NodeUpdate, StreamMessage
from llama405b_tools.run.query import HostMessage


def plan(*program, name="r", attempt=2, created=0.0, addresses=None):
    nodes = tuple(Node(host, 1, i, "/w", "/py", (addresses or {}).get(host, ""), "", {}) for i, host in enumerate("ab"))
    return Plan(name, attempt, created, f"{name}-{attempt}-x", "a:1", program, (), nodes)


def take(watch, host, **news):
    return watch.handle(HostMessage(host, StreamMessage(**news), 0.0))


def metrics(step, loss, attempt):
    return Metrics(step, 0.0, loss, 1.0, 1e-5, 10 * step, 5.0, 2.0, 0.1, 0.2, 0.3, 0.4, attempt=attempt)


def ended(cause, exit_code=1):
    return NodeUpdate(False, NodeStatus("h", NodeState.EXITED, 2, 1, 1, exit_code=exit_code, cause=cause), "")
