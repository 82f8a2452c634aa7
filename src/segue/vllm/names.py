"""What requests are called by those that continue them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from segue.vllm.turns import Asked

_MOST_SALT = 64  # characters that are kept as they are

_RANDOM_PART = re.compile(r"-[0-9a-f]{8}$")  # vLLM adds it to the ids that callers choose
_CONVERSATION = re.compile(r"(\d+_)?(chatcmpl-|resp_)")  # the first part tells the answers to one request apart


def is_conversation(request_id: str) -> bool:
    """Whether the prompt has all that was said before, and not only what is new."""
    return _CONVERSATION.match(request_id) is not None


def names_of(asked: Asked) -> list[str]:
    """A server's `cmpl-x` is `cmpl-x-0-1a2b3c4d` here, its `resp_x` `resp_x_0-1a2b3c4d`; whoever continues it need not know. The
    last is the one to tell."""
    own = asked.request.request_id
    bare = _RANDOM_PART.sub("", own)
    short = bare.removesuffix("_0" if bare.startswith("resp_") else "-0")
    return list(dict.fromkeys((own, bare, short, asked.fields.state_id or own)))


def short_salt(salt: str) -> str:
    """A tenant's salt as it is remembered, for every name that it has used: a long one as its digest. A null character ends the
    tenant's own part."""
    return "\0".join(
        part if len(part) <= _MOST_SALT else blake2b(part.encode(), digest_size=16).hexdigest()
        for part in salt.split("\0", 1)
    )


class Names:
    """A tenant's names are its own: by its salt, each leads to the id of the last request that had it.

    Of those that have ended, `most` are remembered, and all whose state is (`has_state`).
    """

    def __init__(self, most: int, has_state: Callable[[str], bool]) -> None:
        self._most = most
        self._has_state = has_state
        self._under_way: dict[tuple[str, str], str] = {}
        self._ended: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        """Of requests under way."""
        return len(self._under_way)

    def running(self, salt: str, name: str) -> str | None:
        return self._under_way.get((salt, name))

    def ended(self, salt: str, name: str) -> str | None:
        return self._ended.get((salt, name))

    def begin(self, asked: Asked) -> None:
        salt, own = asked.turn.scope.salt, asked.request.request_id
        self._under_way |= {(salt, name): own for name in names_of(asked)}

    def end(self, asked: Asked) -> None:
        salt, own = asked.turn.scope.salt, asked.request.request_id
        for name in names_of(asked):
            if self._under_way.get((salt, name)) == own:
                del self._under_way[salt, name]
            self._ended[salt, name] = own
            self._ended.move_to_end((salt, name))
        while len(self._ended) > self._most:
            key, ended = self._ended.popitem(last=False)
            if self._has_state(ended):
                self._ended[key] = ended
