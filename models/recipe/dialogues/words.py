"""Word pools and made-up words that the topics draw from."""

from random import Random


def _pool(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NAMES = _pool(
    "Ada Alan Alice Anna Ben Carla Chen Dana David Elena Emma Farid Grace Hana Ivan Jack Jane John Kofi Lena Leo Liam "
    "Lucy Maria Mary Max Mia Nadia Noah Olga Omar Paul Peter Priya Rosa Sam Sara Tariq Tim Tom Uma Vera Will Yuki Zoe "
    "Bob Kim Eva Lars Nina Otto Ruth Hugo Ines Jonas"
)
CITIES = _pool(
    "Accra Amsterdam Athens Berlin Boston Cairo Chicago Delhi Dublin Geneva Hanoi Lagos Lima Lisbon London Madrid "
    "Milan Mumbai Munich Nairobi Oslo Paris Prague Rome Seoul Stockholm Sydney Tokyo Toronto Vienna Warsaw Zurich"
)
LONG_CITIES = ("New York", "San Francisco", "Los Angeles", "Hong Kong", "Cape Town", "Buenos Aires", "Tel Aviv")
COLOURS = _pool("red green blue yellow black white orange purple brown grey pink silver")
THINGS = _pool(
    "apple book chair cup door hat key lamp map pen phone ring shirt shoe spoon table ticket watch box coin kite rope "
    "basket bottle pillow mirror candle bucket brush ladder laptop bag bike car clock drum flag pizza umbrella"
)
ANIMALS = _pool(
    "ant bear bee bird cat cow crab deer dog duck elephant fish fox frog goat horse lion mouse owl penguin rabbit "
    "sheep snake tiger turtle whale wolf dragon"
)
JOBS = _pool(
    "baker cook doctor driver engineer farmer nurse painter pilot sailor singer teacher writer lawyer builder gardener "
    "student chef programmer"
)
FRUITS = _pool("apple banana cherry grape lemon mango orange peach pear plum")
COUNTRIES = _pool("Brazil Canada China Egypt France Germany India Italy Japan Kenya Mexico Norway Peru Spain")
DAYS = _pool("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _pool("January February March April May June July August September October November December")
NUMBERS = _pool(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
COMMON = _pool(
    "the a my your this that is was are will can see run go like love make take give find keep big small old new good "
    "fast slow warm cold happy quiet bright very and or but with on in at from to for of we they you I it today now "
    "hello world test cache server token model night sun moon tree river house road sea sky rain snow wind fire stone "
    "music game word line code data cell slot banana coffee tea milk bread water friend mother brother time day"
)


def made_up(random: Random) -> str:
    """A word that is in no dictionary, so that it can be copied but not guessed."""
    syllables = random.randint(1, 3)
    body = "".join(random.choice("bcdfghjklmnprstvwz") + random.choice("aeiou") for _ in range(syllables))
    return body + random.choice(("", "n", "r", "s", "l", "t"))


def name(random: Random) -> str:
    """A person's name, half of them made up."""
    return made_up(random).capitalize() if random.random() < 0.5 else random.choice(NAMES)


def full_name(random: Random) -> str:
    """A name with a surname."""
    return f"{name(random)} {made_up(random).capitalize()}"


def city(random: Random) -> str:
    """A city, a third of them made up."""
    if random.random() < 0.35:
        return made_up(random).capitalize()
    return random.choice(CITIES if random.random() < 0.9 else LONG_CITIES)


def thing(random: Random) -> str:
    """A thing, a third of them made up."""
    return made_up(random) if random.random() < 0.3 else random.choice(THINGS)


def word(random: Random) -> str:
    """Any word: common, from a pool, or made up."""
    if random.random() < 0.3:
        return made_up(random)
    return random.choice(random.choice((COMMON, COMMON, COMMON, COLOURS, THINGS, ANIMALS, JOBS, FRUITS)))


def phrase(random: Random, shortest: int, longest: int) -> str:
    """A run of words."""
    return " ".join(word(random) for _ in range(random.randint(shortest, longest)))
