"""What to run next: first 5 seeds of every experiment, then 10 of those that have a claim which is still open."""

from collections.abc import Sequence

from papers import looks
from papers.claims import CLAIMS
from papers.experiment import Experiment
from papers.image_sets import ImageSet
from papers.jobs import Task, finished
from papers.verdicts import DECIDED, judge

Row = dict[str, str]
Pair = tuple[Experiment, ImageSet]


def missing(pairs: Sequence[Pair], seeds: Sequence[int], rows: Sequence[Row], abreast: int = 1) -> list[Task]:
    """Return the jobs of experiments with seeds that the results do not have.

    Args:
        pairs: experiments with their images.
        seeds: for all of them.
        rows: of the results file.
        abreast: jobs at a time. Those that run together have different seeds, so that none waits for a run that
            another is training.
    """
    done = finished(rows)
    tasks = [task for seed in seeds for pair in pairs if (task := Task(*pair, seed)).key not in done]
    left = sorted({task.seed for task in tasks})
    # a short last group joins the one before it
    group = {seed: min(i // abreast, max(0, len(left) // abreast - 1)) for i, seed in enumerate(left)}
    places = {(e.key, images.name): i for i, (e, images) in enumerate(pairs)}
    return sorted(tasks, key=lambda t: (group[t.seed], places[t.experiment.key, t.images.name], t.seed))


def undecided(pairs: Sequence[Pair], rows: Sequence[Row]) -> list[Pair]:
    """Return the experiments with a claim that the looks so far do not decide."""
    return [pair for pair in pairs if any(verdict not in DECIDED for verdict in _verdicts(*pair, rows))]


def next_tasks(pairs: Sequence[Pair], rows: Sequence[Row], abreast: int = 1) -> list[Task]:
    """Return the jobs of the first look that is not complete; none when every claim is decided or had both looks."""
    for count in looks.SEEDS:
        if tasks := missing(pairs, range(count), rows, abreast):
            return tasks
        pairs = undecided(pairs, rows)
    return []


def values_of(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Return metric → variant → seed → value; of what was done again the last counts."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        found.setdefault(row["metric"], {}).setdefault(row["variant"], {})[row["seed"]] = float(row["value"])
    return found


def _verdicts(experiment: Experiment, images: ImageSet, rows: Sequence[Row]) -> list[str]:
    digest = experiment.digest(images.describe())
    own = [r for r in rows if (f"{r['paper']}/{r['experiment']}", r["digest"]) == (experiment.key, digest)]
    values = values_of(own)
    claims = [c for c in CLAIMS if (c.paper, c.experiment) == (experiment.paper, experiment.name)]
    return [judge(claim, values.get(claim.metric, {})).verdict for claim in claims]
