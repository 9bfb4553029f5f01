"""The numbers of CIFAR-10's and CIFAR-100's classes, by which the labels of published arrays are given."""

from collections.abc import Sequence

from vtk.errors import DataError

CIFAR_10 = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR_100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""
_SETS = {10: CIFAR_10.split(), 100: CIFAR_100.split()}
_ALSO = {"plane": "airplane", "car": "automobile", "computer_keyboard": "keyboard"}
"""Other spellings."""


def class_numbers(classes: Sequence[str]) -> list[int]:
    """Return the index in ``classes`` of each label number of CIFAR.

    Names may have spaces or hyphens, and any case; the numbers themselves are names, too.

    Raises:
        DataError: the classes are not those of CIFAR-10 or CIFAR-100, so that labels would be of other classes.
    """
    known = _SETS.get(len(classes))
    if known is None:
        raise DataError(
            f"the labels are numbers of CIFAR-10's or CIFAR-100's classes, and the model has {len(classes)} classes; "
            "give a model of 10 or 100"
        )
    plain = [name.casefold().strip().replace(" ", "_").replace("-", "_") for name in classes]
    plain = [_ALSO.get(name, name) for name in plain]
    numbers = [str(i) for i in range(len(known))]
    wanted = numbers if sorted(plain) == sorted(numbers) else known
    where = {name: i for i, name in enumerate(plain)}
    if absent := [name for name in wanted if name not in where]:
        raise DataError(
            f"the model's classes are not CIFAR-{len(known)}'s, by whose numbers the arrays are labelled: {absent[0]} "
            f"is not among {', '.join(classes[:5])}, …; give a model with those names, or with the numbers from 0"
        )
    return [where[name] for name in wanted]
