"""Which samples go into which mini-batch, and which sequences into which micro-batch of which rank.

Plain Python and deterministic: every rank computes the same plan from the same lengths.
"""

from collections.abc import Callable, Sequence

DEFAULT_CROSSOVER = 16384
"""Length, in tokens, at which attention is taken to cost as much as everything else (see `flops_cost`)."""

Bins = list[list[int]]


def split_mini_batches(groups: Sequence[int], num_mini_batches: int) -> list[list[int]]:
    """Sample indices of each mini-batch; `groups[i]` is the group of sample i.

    Groups stay whole and in rollout order; numbers of groups differ by at most one. Raises ValueError where there are
    fewer groups than mini-batches.
    """
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(groups):
        members.setdefault(group, []).append(sample)
    if not 1 <= num_mini_batches <= len(members):
        raise ValueError(
            f"train.updates_per_rollout={num_mini_batches} needs as many prompts, the rollout has {len(members)}: "
            "lower it or raise rollout.prompts_per_step"
        )
    ordered = list(members.values())
    edges = [len(ordered) * k // num_mini_batches for k in range(num_mini_batches + 1)]
    return [sum(ordered[low:high], []) for low, high in zip(edges, edges[1:], strict=False)]


def default_cost(length: int) -> float:
    """Relative cost of one sequence of `length` tokens: linear layers, and attention that overtakes them late."""
    return length * (1 + length / DEFAULT_CROSSOVER)


def flops_cost(num_layers: int, num_active_parameters: int, attention_size: int) -> Callable[[int], float]:
    """Cost function in FLOPs of a forward and backward pass over one sequence under causal attention.

    `num_active_parameters`: parameters a token meets (embeddings left out, active experts only). `attention_size`:
    number of heads * head size. 6 FLOPs a parameter and token; 6 * attention_size a layer and pair of positions.
    """

    def cost(length: int) -> float:
        return 6.0 * length * (num_active_parameters + num_layers * attention_size * length)

    return cost


def plan_micro_batches(
    lengths: Sequence[int],
    num_ranks: int,
    token_budget: int,
    cost: Callable[[int], float] | None = None,
    *,
    least: int = 1,
    multiple: int = 1,
) -> list[list[Bins]]:
    """[rank][micro_batch] -> indices into `lengths`, each index exactly once.

    Every rank gets the same number of micro-batches, the smallest for which a packing is found, counted up from the
    bound that the total of tokens sets. No micro-batch holds more than `token_budget` tokens. The k-th micro-batches of
    all ranks cost about the same, because expert parallelism runs them in lock step, and so do the ranks in total.
    `cost(length)` is in any unit; `default_cost` when not given. `least` and `multiple` bound the number of
    micro-batches of a rank from below and make it a multiple, for schedules that ask for that. A micro-batch is empty
    only where there are fewer sequences than micro-batches. Raises ValueError for a sequence longer than the budget.
    """
    for index, length in enumerate(lengths):
        if length > token_budget:
            raise ValueError(
                f"train.tokens_per_micro_batch={token_budget} is less than the {length} tokens of sequence {index}: "
                "raise it, or lower rollout.max_response_tokens or data.max_prompt_tokens"
            )
    if not lengths:
        return [[] for _ in range(num_ranks)]
    costs = [float((cost or default_cost)(length)) for length in lengths]
    num_rows = max(least, -(-sum(lengths) // (token_budget * num_ranks)))
    num_rows = -(-num_rows // multiple) * multiple
    while (bins := _fill(lengths, costs, num_rows * num_ranks, token_budget)) is None:
        num_rows += multiple
    packer = _Packer(lengths, costs, bins, num_ranks, token_budget)
    packer.refine(num_rounds=4)
    return packer.deal_to_ranks()


def _fill(lengths: Sequence[int], costs: Sequence[float], num_bins: int, token_budget: int) -> Bins | None:
    """Longest sequence first, each into the cheapest bin that has room, else into the fullest; None if one has none."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for by_cost in (True, False):
        bins: Bins = [[] for _ in range(num_bins)]
        tokens, load = [0] * num_bins, [0.0] * num_bins
        for index in order:
            room = token_budget - lengths[index]
            fitting = [b for b in range(num_bins) if tokens[b] <= room]
            if not fitting:
                break
            best = min(fitting, key=load.__getitem__) if by_cost else max(fitting, key=tokens.__getitem__)
            bins[best].append(index)
            tokens[best] += lengths[index]
            load[best] += costs[index]
        else:
            for empty in (b for b in range(num_bins) if not bins[b]):
                donor = max(range(num_bins), key=lambda b: len(bins[b]))
                if len(bins[donor]) > 1:
                    bins[empty].append(bins[donor].pop())
            return bins
    return None


class _Packer:
    """Bins of sequences in rows of `num_ranks` (row k: micro-batch k of all ranks), refined by exchanging sequences.

    A row takes as long as its dearest bin. `rows` are ordered by cost, dearest first.
    """

    def __init__(self, lengths: Sequence[int], costs: Sequence[float], bins: Bins, num_ranks: int, token_budget: int):
        self.lengths, self.costs, self.num_ranks, self.token_budget = lengths, costs, num_ranks, token_budget
        self.bins = bins
        self.load = [sum(costs[index] for index in members) for members in bins]
        self.tokens = [sum(lengths[index] for index in members) for members in bins]
        self.rows = self._sorted_rows()

    def _sorted_rows(self) -> Bins:
        order = sorted(range(len(self.bins)), key=self.load.__getitem__, reverse=True)
        return [order[start : start + self.num_ranks] for start in range(0, len(order), self.num_ranks)]

    def refine(self, num_rounds: int) -> None:
        """Fill the slack of dear rows from cheap rows and even out each row, `num_rounds` times; keep the best."""
        best = None
        for _ in range(num_rounds):
            for row in self.rows:
                self._even_out(row)
            span = sum(max(self.load[b] for b in row) for row in self.rows)
            if best is None or span < best[0]:
                best = (span, [list(members) for members in self.bins], list(self.load), list(self.tokens), self.rows)
            self._fill_slack()
            self.rows = self._sorted_rows()
        _, self.bins, self.load, self.tokens, self.rows = best

    def _even_out(self, row: list[int], tolerance: float = 1e-3, max_steps: int = 64) -> None:
        """Lower the cost of the row's dearest bin until it is within `tolerance` of the row's mean, or stuck."""
        mean = sum(self.load[b] for b in row) / self.num_ranks
        for _ in range(max_steps):
            dearest = max(row, key=self.load.__getitem__)
            if self.load[dearest] <= mean * (1 + tolerance):
                return
            others = sorted((b for b in row if b != dearest), key=self.load.__getitem__)
            gaps = ((other, self.load[dearest] - self.load[other]) for other in others)
            if not any(self._exchange(dearest, other, gap / 2, gap) for other, gap in gaps):
                return

    def _fill_slack(self) -> None:
        """Raise each bin towards its row's dearest, which costs no time, with sequences of the cheaper rows."""
        for k, row in enumerate(self.rows[:-1]):
            limit = max(self.load[b] for b in row)
            for b in row:
                for donors in self.rows[k + 1 :]:
                    slack = limit - self.load[b]
                    if slack > 1e-3 * limit:
                        self._exchange(max(donors, key=self.load.__getitem__), b, slack, slack)

    def _exchange(self, dear: int, cheap: int, wanted: float, limit: float) -> bool:
        """Move a sequence from `dear` to `cheap`, or swap two, to shift about `wanted` of cost, less than `limit`.

        Takes the exchange that comes nearest to `wanted` within the token budget. False if there is none.
        """
        room, room_back = self.token_budget - self.tokens[cheap], self.token_budget - self.tokens[dear]
        best, best_pair = wanted * (1 - 1e-6), None
        for given in self.bins[dear]:
            for taken in (None, *self.bins[cheap]):
                if taken is None:
                    tokens, shift = self.lengths[given], self.costs[given]
                else:
                    tokens = self.lengths[given] - self.lengths[taken]
                    shift = self.costs[given] - self.costs[taken]
                if -room_back <= tokens <= room and 0 < shift <= limit and abs(wanted - shift) < best:
                    if taken is not None or len(self.bins[dear]) > 1:
                        best, best_pair = abs(wanted - shift), (given, taken)
        if best_pair is None:
            return False
        self._move(best_pair[0], dear, cheap)
        if best_pair[1] is not None:
            self._move(best_pair[1], cheap, dear)
        return True

    def _move(self, index: int, source: int, target: int) -> None:
        for b, sign in ((source, -1), (target, 1)):
            self.load[b] += sign * self.costs[index]
            self.tokens[b] += sign * self.lengths[index]
        self.bins[source].remove(index)
        self.bins[target].append(index)

    def deal_to_ranks(self, tolerance: float = 7e-3, max_steps: int = 200) -> list[list[Bins]]:
        """One bin of each row a rank, the dearest to the rank that has least so far.

        Then no rank may cost more than its share by `tolerance`: it gives sequences to others inside a row, where that
        does not lengthen the row, or else where it lengthens one row a little, spread over all other ranks.
        """
        dealt: Bins = [[] for _ in range(self.num_ranks)]
        for row in self.rows:
            ranks = sorted(range(self.num_ranks), key=lambda rank: self._total(dealt[rank]))
            for rank, b in zip(ranks, sorted(row, key=self.load.__getitem__, reverse=True), strict=True):
                dealt[rank].append(b)
        limits = [max(self.load[b] for b in row) for row in self.rows]
        share = sum(self.load) / self.num_ranks
        num_raises = 0
        for _ in range(max_steps):
            dealt.sort(key=self._total)
            excess = self._total(dealt[-1]) - share * (1 + tolerance)
            if excess <= 0:
                break
            excess += 1e-3 * share  # a little more than needed, or ever smaller steps creep up to the bound
            if not any(self._give(dealt[-1], taker, excess, limits) for taker in dealt[:-1]):
                limits[-1 - num_raises % len(limits)] += max(excess / (self.num_ranks - 1), 2e-3 * share)
                num_raises += 1
        return [[sorted(self.bins[b]) for b in rank] for rank in dealt]

    def _total(self, rank_bins: list[int]) -> float:
        return sum(self.load[b] for b in rank_bins)

    def _give(self, giver: list[int], taker: list[int], excess: float, limits: list[float]) -> bool:
        """Shift about `excess` from one rank to another inside the row that has most room below its limit."""
        gap = self._total(giver) - self._total(taker)
        for k in sorted(range(len(limits)), key=lambda k: self.load[taker[k]] - limits[k]):
            room = min(limits[k] - self.load[taker[k]], gap / 2)
            if room > 0.05 * excess and self._exchange(giver[k], taker[k], min(excess, room), room):
                return True
        return False
