"""Names of the classes of public data sets, in the order of the numbers that their files give them."""

from __future__ import annotations

import string

DIGITS = tuple(string.digits)

FASHION_MNIST = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")

EMNIST_BYCLASS = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)

CARLA = ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign")
"""As the recordings' ``labels.txt`` spells them."""

CIFAR_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_CIFAR_100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""
CIFAR_100 = tuple(_CIFAR_100.split())
"""The fine labels."""
