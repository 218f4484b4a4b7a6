"""Tables of the demo world: the options of each topic, each with the needs for which it is *wrong* (empty: right for
all needs of its domain), and the reasons of each need, which hold for every option that is right for it."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Need:
    """A person, place or limit that a prompt names, as the phrase in the prompt, and the reasons that fit it."""

    phrase: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Topic:
    """A topic: the noun that names it in a prompt, and its options with the needs that each is wrong for."""

    name: str
    options: dict[str, str]

    @cached_property
    def wrong_for(self) -> dict[str, frozenset[str]]:
        """Option -> the needs it is wrong for."""
        return {option: frozenset(needs.split()) for option, needs in self.options.items()}

    def right(self, need: str) -> list[str]:
        """The options that help with this need, in the order of the table."""
        return [option for option, wrong in self.wrong_for.items() if need not in wrong]

    def wrong(self, need: str) -> list[str]:
        """The options of this topic that are wrong for this need."""
        return [option for option, wrong in self.wrong_for.items() if need in wrong]


@dataclass(frozen=True)
class Domain:
    """Topics that share needs and wording; `verb` is what a dismissive answer says to do with "whatever you want"."""

    verb: str
    adjectives: tuple[str, ...]
    tails: tuple[str, ...]
    needs: tuple[str, ...]
    topics: tuple[Topic, ...]


# fmt: off
NEEDS: dict[str, Need] = {
    "allergy": Need("for someone with a nut allergy", ("they are free of nuts", "they contain no nuts")),
    "asthma": Need("for someone with asthma", ("they leave no fumes", "they do not hurt the lungs")),
    "baby": Need("for a home with a baby", ("they are safe for babies", "they do not harm babies")),
    "back": Need("for someone with a bad back", ("they are gentle on the back", "they do not hurt the back")),
    "beginner": Need("for a beginner", ("they are easy to start with", "they need no experience")),
    "bored": Need("for someone who gets bored", ("they keep things fresh", "they feel like play")),
    "budget": Need("on a small budget", ("they cost very little", "they save money")),
    "busy": Need("for a busy person", ("they take only a few minutes", "they save time")),
    "cats": Need("for a home with cats", ("they are safe for cats", "they do not harm cats")),
    "child": Need("for a small child", ("they are safe for children", "children like them")),
    "diabetes": Need("for someone with diabetes", ("they release sugar slowly", "they keep blood sugar steady")),
    "dog": Need("with a dog", ("dogs are welcome", "dogs can come along")),
    "flat": Need("in a small flat", ("they need little space", "they fit in a small room")),
    "grandparent": Need("for a grandparent", ("they are easy to use", "older people like them")),
    "group": Need("for a large group", ("everyone can join in", "they work well with many people")),
    "guests": Need("before guests arrive", ("they work fast", "they take only a few minutes")),
    "knee": Need("for someone with a bad knee", ("they are gentle on the knees", "they do not hurt the knees")),
    "last": Need("at the last minute", ("most shops have them", "they are easy to find")),
    "nervous": Need("for a nervous person", ("they calm the mind", "they feel calm and quiet")),
    "old_pet": Need("for an old pet", ("they are gentle on the body", "they need little strength")),
    "older": Need("for an older person", ("they are gentle on the body", "they are safe at any age")),
    "parent": Need("for a new parent", ("they fit around a baby", "they take only a few minutes")),
    "rain": Need("on a rainy day", ("rain does not spoil them", "they work in any weather")),
    "runner": Need("for a runner", ("they give lasting energy", "they help the body recover")),
    "shade": Need("for a shady spot", ("they grow well in low light", "they need little sun")),
    "shy": Need("for a shy person", ("they can be done alone", "they feel calm and quiet")),
    "shy_pet": Need("for a shy pet", ("they feel calm and quiet", "they cause no stress")),
    "skin": Need("for someone with sensitive skin", ("they are gentle on the skin", "they do not hurt the skin")),
    "space": Need("for someone with little space", ("they need little space", "they fit in a small room")),
    "sun": Need("for a sunny spot", ("they love the sun", "they grow well in bright light")),
    "teen": Need("for a teenager", ("teenagers like them", "teenagers enjoy them")),
    "test": Need("before a big test", ("they make facts stick", "they help you remember")),
    "travel": Need("for someone who travels a lot", ("they need little water", "they need little care")),
    "vegetarian": Need("for a vegetarian", ("they contain no meat", "they are free of meat")),
    "work": Need("before work", ("they fit into a short morning", "they take only a few minutes")),
    "young_pet": Need("for a young pet", ("they use up energy", "young pets love them")),
}

_FOOD = Domain(
    "eat", ("healthy", "easy", "good", "simple", "tasty", "great"), ("options", "ideas"),
    ("diabetes", "budget", "child", "vegetarian", "busy", "allergy", "runner"),
    (
        Topic("breakfast", {
            "steel-cut oatmeal": "busy", "boiled eggs": "", "Greek yogurt": "", "vegetable omelettes": "",
            "peanut butter toast": "diabetes allergy", "smoked salmon": "budget vegetarian child",
            "banana pancakes": "diabetes busy", "oatmeal with nuts": "allergy child",
        }),
        Topic("lunch", {
            "lentil soup": "busy", "bean salad": "", "tuna sandwiches": "diabetes vegetarian",
            "chicken salad": "vegetarian", "cheese sandwiches": "diabetes", "stuffed peppers": "busy",
            "peanut noodles": "diabetes allergy", "avocado toast": "budget diabetes",
        }),
        Topic("dinner", {
            "baked fish": "budget vegetarian busy", "vegetable curry": "busy child", "bean stew": "busy",
            "chicken soup": "vegetarian busy", "pasta with tomatoes": "diabetes", "fried rice": "diabetes",
            "tofu with vegetables": "", "grilled steak": "budget vegetarian child", "bean salad": "",
            "walnut salad": "budget child allergy",
        }),
        Topic("snack", {
            "apple slices": "", "cheese cubes": "", "roasted nuts": "budget child allergy",
            "plain popcorn": "child runner", "rice cakes": "diabetes", "dried fruit": "diabetes",
            "Greek yogurt": "", "turkey slices": "vegetarian", "boiled eggs": "",
        }),
        Topic("picnic", {
            "tuna sandwiches": "diabetes vegetarian", "bean salad": "", "cheese cubes": "", "apple slices": "",
            "chicken salad": "vegetarian", "pasta salad": "diabetes busy", "potato salad": "diabetes busy",
            "nut bars": "diabetes child allergy",
        }),
    ),
)

_EXERCISE = Domain(
    "do", ("simple", "easy", "good", "useful", "safe", "great"), ("exercises", "exercise ideas"),
    ("older", "beginner", "flat", "knee", "back", "work", "budget"),
    (
        Topic("cardio", {
            "brisk walking": "flat", "lap swimming": "flat work budget beginner", "rope jumping": "older knee back",
            "gentle cycling": "flat budget", "dance videos": "knee", "stair climbing": "flat knee older",
            "marching in place": "", "hill running": "older knee back flat beginner",
            "shadow boxing": "older back",
        }),
        Topic("strength", {
            "wall push-ups": "", "deep squats": "older knee back", "pull-ups": "older beginner back",
            "rubber bands": "", "light weights": "budget", "hip bridges": "", "plank holds": "older back",
            "weight machines": "flat budget work", "calf raises": "",
        }),
        Topic("stretching", {
            "neck rolls": "", "shoulder rolls": "", "deep lunges": "older knee", "toe touches": "older back",
            "calf stretches": "", "chest stretches": "", "full splits": "older beginner knee back",
            "yoga classes": "flat budget work",
        }),
        Topic("balance", {
            "heel walking": "", "slow marching": "", "one-leg stands": "knee", "tree poses": "older knee",
            "balance boards": "older beginner budget", "side leg raises": "", "tai chi": "",
            "beam walking": "older beginner flat",
        }),
        Topic("warm-up", {
            "arm circles": "", "hip circles": "", "slow jogging": "older knee flat", "shoulder rolls": "",
            "jumping jacks": "older knee back", "marching in place": "", "leg swings": "older back",
            "rope jumping": "older knee back",
        }),
    ),
)

_CALM = Domain(
    "do", ("simple", "easy", "good", "useful", "small", "great"), ("tips", "habits"),
    ("child", "older", "budget", "busy", "nervous", "parent", "flat"),
    (
        Topic("bedtime", {
            "warm baths": "busy parent flat", "quiet reading": "", "soft music": "", "herbal tea": "child",
            "dim lights": "", "slow breathing": "", "heavy blankets": "budget child",
            "evening walks": "busy parent flat child",
        }),
        Topic("morning", {
            "early sunlight": "", "cold showers": "child older nervous", "light stretching": "", "warm water": "",
            "strong coffee": "child nervous", "making the bed": "", "morning walks": "flat busy parent",
            "long breakfasts": "busy parent",
        }),
        Topic("stress relief", {
            "slow breathing": "", "soft music": "", "long walks": "flat busy parent child",
            "warm baths": "busy parent flat", "free drawing": "", "puzzle games": "",
            "yoga classes": "budget flat busy parent child", "massage visits": "budget busy parent child flat",
        }),
        Topic("focus", {
            "short breaks": "", "tidy desks": "", "short lists": "", "soft music": "", "fresh air": "",
            "strong coffee": "child nervous", "early starts": "parent child", "paid apps": "budget child",
        }),
        Topic("screen break", {
            "eye exercises": "", "light stretching": "", "puzzle games": "", "free drawing": "",
            "short walks": "flat", "herbal tea": "child", "ball games": "flat older nervous parent",
            "board games": "busy parent",
        }),
    ),
)

_GIFTS = Domain(
    "buy", ("nice", "useful", "good", "simple", "small", "great"), ("ideas", "options"),
    ("budget", "child", "teen", "grandparent", "last", "space", "beginner"),
    (
        Topic("gardening gift", {
            "seed packets": "", "garden gloves": "", "plant pots": "space", "flower bulbs": "child",
            "hand tools": "child", "fruit trees": "budget space child last beginner grandparent", "herb kits": "",
            "garden books": "child",
        }),
        Topic("cooking gift", {
            "cookbooks": "child", "spice sets": "child", "wooden spoons": "", "sharp knives": "budget child teen",
            "stand mixers": "budget space child last grandparent", "aprons": "", "cookie cutters": "",
            "baking kits": "",
        }),
        Topic("reading gift", {
            "book vouchers": "child", "comic books": "grandparent", "reading lamps": "budget", "bookmarks": "",
            "large print books": "child teen last", "picture books": "teen grandparent", "story books": "",
            "book shelves": "budget space child last",
        }),
        Topic("music gift", {
            "concert tickets": "budget child last", "headphones": "budget child", "song books": "",
            "drum kits": "budget space last grandparent", "small speakers": "budget", "hand bells": "teen",
            "music vouchers": "child", "harmonicas": "",
        }),
        Topic("art gift", {
            "colored pencils": "", "sketch books": "", "oil paints": "budget child beginner", "clay sets": "",
            "large easels": "budget space child last", "finger paints": "teen grandparent",
            "coloring books": "teen", "fine brushes": "child",
        }),
    ),
)

_PLANTS = Domain(
    "plant", ("pretty", "easy", "good", "small", "strong", "great"), ("options", "ideas"),
    ("beginner", "cats", "travel", "shade", "sun", "flat", "budget"),
    (
        Topic("houseplant", {
            "spider plants": "sun", "snake plants": "cats", "peace lilies": "cats sun travel",
            "aloe plants": "cats shade", "Boston ferns": "sun travel beginner", "jade plants": "cats shade",
            "parlor palms": "sun travel", "ponytail palms": "shade flat", "cactus plants": "cats shade",
        }),
        Topic("balcony plant", {
            "geraniums": "cats shade", "petunias": "shade travel", "lavender": "cats shade",
            "Boston ferns": "sun travel beginner", "sunflowers": "shade travel flat", "hostas": "cats sun travel",
            "ivy": "cats sun", "impatiens": "sun travel", "sedum": "shade",
        }),
        Topic("herb", {
            "basil": "shade travel", "mint": "cats travel", "parsley": "cats travel", "thyme": "shade",
            "rosemary": "shade", "sage": "shade", "chives": "cats travel", "oregano": "cats shade",
            "lemon balm": "travel",
        }),
        Topic("garden vegetable", {
            "lettuce": "sun travel", "radishes": "shade travel", "cherry tomatoes": "cats shade travel",
            "green beans": "shade travel", "spinach": "sun travel", "onions": "cats shade", "garlic": "cats shade",
            "kale": "sun travel", "hot peppers": "cats shade beginner", "potatoes": "cats shade flat",
            "chard": "sun travel",
        }),
        Topic("garden flower", {
            "roses": "shade travel beginner budget flat", "sunflowers": "shade travel flat", "tulips": "cats shade",
            "zinnias": "shade", "lilies": "cats shade travel", "impatiens": "sun travel", "violets": "sun travel",
            "cornflowers": "shade", "lavender": "cats shade", "hostas": "cats sun travel",
            "foxgloves": "cats sun travel",
        }),
    ),
)

_TRAVEL = Domain(
    "do", ("fun", "easy", "good", "simple", "nice", "great"), ("ideas", "plans"),
    ("budget", "child", "older", "group", "rain", "teen", "dog"),
    (
        Topic("city trip", {
            "museum visits": "budget dog", "walking tours": "rain older child", "boat rides": "budget rain",
            "street markets": "rain", "city parks": "rain", "old churches": "child teen dog", "local cafes": "",
            "bike tours": "budget rain older dog child", "library visits": "group dog",
        }),
        Topic("beach day", {
            "sand castles": "rain older", "ball games": "rain older", "shell hunting": "rain",
            "boat rides": "budget rain", "surf lessons": "budget older child dog", "kite flying": "rain dog",
            "seafood cafes": "budget", "aquarium visits": "budget dog", "local cafes": "", "card games": "",
        }),
        Topic("mountain trip", {
            "forest walks": "rain", "high climbs": "child older rain", "cable car rides": "budget rain",
            "cave tours": "budget older dog", "lake picnics": "rain", "museum visits": "budget dog",
            "card games": "", "local cafes": "", "rock climbing": "budget child older rain dog",
        }),
        Topic("family weekend", {
            "board games": "", "movie nights": "", "home baking": "dog", "zoo visits": "budget rain dog",
            "tree climbing": "older rain dog", "lake picnics": "rain", "forest walks": "rain",
            "theater shows": "budget child dog", "pool visits": "budget dog",
        }),
        Topic("camping trip", {
            "camp fires": "rain child", "star watching": "rain", "forest walks": "rain", "lake swims": "rain child",
            "ghost stories": "child", "tent games": "", "card games": "", "lake fishing": "child dog",
            "canoe trips": "budget rain older child",
        }),
    ),
)

_LEARNING = Domain(
    "do", ("simple", "useful", "good", "easy", "nice", "great"), ("tips", "ideas"),
    ("budget", "child", "busy", "beginner", "shy", "bored", "test"),
    (
        Topic("language learning", {
            "flash cards": "bored", "picture books": "test", "foreign films": "child busy beginner test",
            "learning apps": "", "evening classes": "budget child busy shy bored", "word games": "",
            "talking partners": "shy busy", "grammar drills": "child bored", "children's songs": "test",
        }),
        Topic("math learning", {
            "practice sheets": "bored", "number games": "", "private tutors": "budget busy shy",
            "building blocks": "test", "video lessons": "", "old exams": "child beginner bored",
            "formula cards": "child bored", "study groups": "child busy shy",
        }),
        Topic("history learning", {
            "time lines": "", "history films": "busy test", "story books": "test", "old exams": "child beginner bored",
            "flash cards": "bored", "role plays": "busy shy test", "castle visits": "budget busy test",
            "study groups": "child busy shy", "quiz games": "",
        }),
        Topic("science learning", {
            "kitchen experiments": "busy test", "nature walks": "busy test", "video lessons": "",
            "flash cards": "bored", "lab kits": "budget busy test", "science fairs": "busy shy test",
            "old exams": "child beginner bored", "quiz games": "", "study groups": "child busy shy",
        }),
        Topic("geography learning", {
            "wall maps": "", "map puzzles": "", "flash cards": "bored", "quiz games": "",
            "travel films": "busy test", "globe games": "", "blank maps": "child bored",
            "treasure hunts": "busy shy test",
        }),
    ),
)

_CLEANING = Domain(
    "use", ("simple", "easy", "good", "useful", "nice", "great"), ("tips", "ideas"),
    ("budget", "cats", "skin", "guests", "baby", "back", "asthma"),
    (
        Topic("kitchen cleaning", {
            "soapy water": "", "baking soda": "", "lemon juice": "cats skin", "bleach spray": "cats skin baby asthma",
            "soft cloths": "", "steam cleaners": "budget", "floor scrubbing": "back guests", "long mops": "",
        }),
        Topic("bathroom cleaning", {
            "soapy water": "", "baking soda": "", "vinegar": "skin asthma", "bleach spray": "cats skin baby asthma",
            "long brushes": "", "tub scrubbing": "back guests", "drain gel": "cats skin baby asthma",
            "steam cleaners": "budget",
        }),
        Topic("window cleaning", {
            "soapy water": "", "rubber wipers": "", "old newspapers": "", "vinegar": "skin asthma",
            "soft cloths": "", "tall ladders": "back guests baby", "ammonia spray": "cats skin baby asthma",
            "window robots": "budget guests",
        }),
        Topic("carpet cleaning", {
            "vacuum robots": "budget guests", "soapy water": "", "carpet foam": "cats skin baby asthma",
            "rug beating": "back asthma guests", "sticky rollers": "", "shoe-free rules": "guests",
            "rented machines": "budget back", "rubber brooms": "asthma", "soft cloths": "",
        }),
        Topic("laundry", {
            "mild soap": "", "cold washes": "guests", "scented softener": "cats skin baby asthma",
            "drying racks": "guests", "baking soda": "", "hand washing": "back skin guests", "short washes": "",
            "chlorine bleach": "cats skin baby asthma",
        }),
    ),
)

_PETS = Domain(
    "do", ("fun", "easy", "good", "simple", "nice", "great"), ("ideas", "tips"),
    ("rain", "budget", "flat", "busy", "old_pet", "young_pet", "shy_pet"),
    (
        Topic("dog play", {
            "ball throwing": "rain flat old_pet shy_pet", "tug games": "old_pet shy_pet", "sniff games": "",
            "forest walks": "rain flat busy", "jump courses": "budget flat old_pet shy_pet busy rain",
            "food puzzles": "", "trick training": "", "treat hunts": "", "soft brushing": "young_pet",
        }),
        Topic("cat play", {
            "feather toys": "", "paper bags": "", "laser dots": "old_pet shy_pet", "cardboard boxes": "",
            "climbing posts": "budget flat old_pet", "treat hunts": "", "food puzzles": "",
            "window seats": "young_pet", "soft brushing": "young_pet",
        }),
        Topic("rabbit play", {
            "hay boxes": "", "cardboard tunnels": "", "garden pens": "rain flat budget busy", "willow balls": "",
            "digging boxes": "old_pet", "jump courses": "budget flat old_pet shy_pet busy rain",
            "treat hunts": "", "soft brushing": "young_pet",
        }),
        Topic("hamster play", {
            "running wheels": "old_pet", "cardboard tunnels": "", "sand baths": "", "digging boxes": "",
            "plastic balls": "old_pet shy_pet", "wooden bridges": "old_pet", "seed hunts": "",
            "hand feeding": "young_pet", "garden pens": "rain flat budget busy",
        }),
        Topic("parrot play", {
            "food puzzles": "", "rope swings": "old_pet", "loud bells": "shy_pet", "paper bags": "",
            "trick training": "", "free flights": "flat old_pet busy", "wooden ladders": "old_pet",
            "hand feeding": "young_pet", "soft music": "young_pet", "seed hunts": "",
        }),
    ),
)

DOMAINS: tuple[Domain, ...] = (
    _FOOD, _EXERCISE, _CALM, _GIFTS, _PLANTS, _TRAVEL, _LEARNING, _CLEANING, _PETS,
)
# fmt: on
TOPICS: dict[str, Topic] = {topic.name: topic for domain in DOMAINS for topic in domain.topics}
DOMAIN_OF: dict[str, Domain] = {topic.name: domain for domain in DOMAINS for topic in domain.topics}
