"""Whether a regular expression can backtrack exponentially in the length of a text, i.e. is exponentially ambiguous.

It is if a position can be reached again from itself in two ways that read the same characters (Weber and Seidl, On the
degree of ambiguity of finite automata, 1991). Positions are the characters of the expression (Glushkov's automaton);
possessive and atomic parts are treated as plain ones, and each assertion as an expression of its own."""

from collections import Counter
from re import _compiler, _constants as op, _parser


_CHARACTERS = [chr(i) for i in range(128)] + ["é", "ſ", "\u2028", "٣"]
_MANY = 3  # copies that stand for an unbounded repetition


def is_exponential(pattern, flags=0):
    """Whether Python's matcher takes exponentially many steps for some text."""
    parsed = _parser.parse(pattern, flags)
    return _Automaton(parsed, parsed.state.flags).ambiguous() or any(
        _Automaton(part, parsed.state.flags).ambiguous() for part in _assertions(parsed)
    )


class _Automaton:
    def __init__(self, parsed, flags):
        self.flags = flags
        self.empty = {}  # node: nodes reached without a character, once for each way
        self.read = {}  # node: (characters, node behind them)
        self.sequence(parsed, self.node())

    def node(self):
        self.empty[len(self.empty)] = []
        return len(self.empty) - 1

    def sequence(self, parsed, at):
        for kind, argument in parsed:
            at = self.part(kind, argument, at)
        return at

    def part(self, kind, argument, at):
        """Add one part of the expression after node `at`; returns the node after the part."""
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            self.read[at] = (_characters(kind, argument, self.flags), self.node())
            return self.read[at][1]
        if kind in (op.AT, op.ASSERT, op.ASSERT_NOT):
            return at
        if kind in (op.SUBPATTERN, op.ATOMIC_GROUP):
            return self.sequence(argument[-1] if kind is op.SUBPATTERN else argument, at)
        if kind is op.BRANCH:
            end = self.node()
            for branch in argument[1]:
                self.empty[at].append(start := self.node())
                self.empty[self.sequence(branch, start)].append(end)
            return end
        assert kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT), f"{kind} is not known here"
        least, most, inner = argument
        end = self.node()
        for i in range(max(min(least, _MANY), 1) if most is op.MAXREPEAT else most):
            if i >= least:
                self.empty[at].append(end)
            self.empty[at].append(start := self.node())
            at = self.sequence(inner, start)
        if most is op.MAXREPEAT:
            self.empty[at].append(start)
        self.empty[at].append(end)
        return end

    def steps(self):
        """For each reading node: the nodes that read next, with the number of ways (at most two)."""
        return {node: Counter(self.reached(behind, frozenset())) for node, (_, behind) in self.read.items()}

    def reached(self, node, passed):
        if node in self.read:
            yield node
        for following in self.empty[node]:
            if following not in passed:
                yield from self.reached(following, passed | {node})

    def ambiguous(self):
        steps = self.steps()
        beyond = {node: _closure([node], lambda one: steps[one]) for node in steps}

        def together(pair):
            """The pairs reachable from `pair` by reading one character in both, within the same loop."""
            one, other = pair
            for x in steps[one]:
                for y in steps[other]:
                    if pair[0] in beyond[x] and pair[1] in beyond[y] and self.read[x][0] & self.read[y][0]:
                        yield x, y

        for node in steps:
            if any(ways > 1 and node in beyond[following] for following, ways in steps[node].items()):
                return True
            apart = [pair for pair in _closure([(node, node)], together) if pair[0] != pair[1]]
            if any((node, node) in _closure([pair], together) for pair in apart):
                return True
        return False


def _closure(start, following):
    """All nodes reached by one or more steps."""
    found, left = set(), list(start)
    while left:
        new = set(following(left.pop())) - found
        found |= new
        left += new
    return found


def _characters(kind, argument, flags):
    one = _parser.SubPattern(_parser.State(), [(kind, argument)])
    matches = _compiler.compile(one, flags).fullmatch
    return frozenset(filter(matches, _CHARACTERS))


def _assertions(parsed):
    """The expressions within assertions, at any depth."""
    for kind, argument in parsed:
        parts = argument if isinstance(argument, tuple) else (argument,)
        for part in parts:
            inner = part if isinstance(part, list) else [part]
            for one in inner:
                if isinstance(one, _parser.SubPattern):
                    if kind in (op.ASSERT, op.ASSERT_NOT):
                        yield one
                    yield from _assertions(one)
