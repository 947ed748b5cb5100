"""The flags of `cellar serve`: what each does, its default, and which flag does what."""

from dataclasses import dataclass
from random import Random

from models.recipe.conversation import Conversation
from models.recipe.dialogues.fact import Fact, converse
from models.recipe.dialogues.phrasing import pick

WHAT = (
    "what does {} do|what is {}|what is {} for|explain {}|tell me about {}|what does {} mean|how do I use {}|"
    "describe {}|"
    "when do I use {}|what can I set with {}|help with {}|{}|what's {}|what does {} control|why would I set {}|"
    "what is the meaning of {}|what happens if I set {}|what does {} change|can you explain {}|how does {} work|"
    "what do I use {} for|define {}|what is the purpose of {}|what should I set {} to|what's {} for"
)
HOW = (
    "how do I {}|how can I {}|how do you {}|how to {}|I want to {}|which flag lets me {}|what flag do I use to {}|"
    "is there a flag to {}|can I {}|is it possible to {}|which option do I need to {}|what do I do to {}|"
    "which flag do I use to {}|I need to {}, how|how would I {}|show me how to {}|which setting lets me {}|"
    "what is the flag to {}|how does one {}|I would like to {}"
)
DEFAULT = (
    "what is the default of {}|what is the default value of {}|default of {}|what is the default for {}|"
    "what value does {} have by default|what is {} by default|what's the default {}|which default does {} have"
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag: what it does, wishes that it grants split by bars, an example, and its default where it is fixed."""

    name: str
    does: str
    wishes: str
    example: str
    default: str = ""

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Questions by name, by wish and for the default, with forms still to fill."""
        follow = [("give me an example|an example please|for example|how do I use it|show me an example|example",
                   f"For example: {self.example}")]  # fmt: skip
        if self.default:
            follow.append(("what is the default|and the default|what is its default|default|what's the default value",
                           f"The default of {self.name} is {self.default}."))  # fmt: skip
        what = Fact(WHAT, f"{self.name} {self.does}", tuple(follow))
        how = Fact(HOW, f"Use {self.name}, for example: {self.example}")
        default = Fact(DEFAULT, f"The default of {self.name} is {self.default}.")
        return (what, what, how, how, default) if self.default else (what, what, how, how)


FLAGS = (
    Flag(
        "--host",
        "sets the address to listen on. Use 0.0.0.0 to accept other machines.",
        "listen on another address|accept requests from other machines|open the server to my network|change the host|"
        "listen on all addresses|reach the server from another computer|set the host|bind to 0.0.0.0|"
        "change the address",
        "cellar serve --host 0.0.0.0", "127.0.0.1",
    ),
    Flag(
        "--port",
        "sets the port to listen on.",
        "change the port|listen on another port|use port 9000|set the port|use a different port|run on another port|"
        "pick the port|serve on port 8080|use another port",
        "cellar serve --port 9000", "8000",
    ),
    Flag(
        "--dtype",
        "sets the number type of the weights: auto, float32, float64, bfloat16 or float16.",
        "change the number type|use float16|use bfloat16|run in float32|set the dtype|use half precision|"
        "choose the precision|change the precision|change the data type|use less memory for the weights|run in bf16",
        "cellar serve --dtype bfloat16", "auto",
    ),
    Flag(
        "--context",
        "sets how many tokens one sequence may hold, prompt and answer together.",
        "change the context length|use longer prompts|set the context size|allow longer conversations|set the context|"
        "limit the tokens of a sequence|get a longer context|change how many tokens a sequence may hold|"
        "increase the context|have a bigger context window|set the context window|limit the length",
        "cellar serve --context 4096",
    ),
    Flag(
        "--slots",
        "sets how many sequences run at once. Each one takes a slot of the shared cache.",
        "run more requests at once|serve more users at once|change the number of slots|set the slots|"
        "run more sequences at the same time|limit how many requests run at once|raise the concurrency|"
        "handle more users|set how many sequences run at once|increase the number of slots|have more slots|"
        "run many requests in parallel|change the batch size|set the concurrency",
        "cellar serve --slots 8",
    ),
    Flag(
        "--served-model-name",
        "sets the name of the model that clients see.",
        "rename the model|change the name of the model|set the model name|give the model another name|"
        "change the served name|set the name that clients see|hide the model name",
        "cellar serve --served-model-name my-model",
    ),
    Flag(
        "--api-key",
        "sets the key that clients must send as a bearer token.",
        "protect the server|set a key|require a key|use a password|set an api key|secure the server|"
        "require authentication|ask clients for a key|add authentication|lock the server|keep strangers out",
        "cellar serve --api-key secret",
    ),
    Flag(
        "--overflow",
        "says what happens when a context is full: length ends the answer, shift drops the oldest tokens.",
        "turn on context shift|go on when the context is full|generate endless text|choose what happens when the "
        "context is full|drop the oldest tokens|enable context shift|set the overflow|handle a full context|"
        "stop when the context is full|use context shift",
        "cellar serve --overflow shift",
    ),
    Flag(
        "--max-waiting",
        "sets how many requests may wait in the queue. More are turned away.",
        "limit the queue|bound the queue|turn requests away when busy|set the queue length|limit the waiting requests|"
        "change the queue size|limit how many requests wait|set a queue limit|make the queue shorter|"
        "reject requests early",
        "cellar serve --max-waiting 64",
    ),
    Flag(
        "--log-level",
        "sets how much the server logs, for example debug, info or warning.",
        "see more logs|change the log level|turn on debug logs|set the log level|make the logs quiet|log less|"
        "get debug output|log more|see debug messages|reduce the logging",
        "cellar serve --log-level debug",
    ),
    Flag(
        "--draft-model",
        "names the small model that guesses tokens for speculative decoding. It comes with a later version.",
        "use a draft model|set the draft model|turn on speculative decoding|enable speculative decoding|"
        "speed up decoding with a draft|choose the draft model",
        "cellar serve --draft-model ./draft",
    ),
    Flag(
        "--drafter",
        "says how tokens are guessed: by a draft model or by lookup in the text. It comes with a later version.",
        "choose the drafter|set the drafter|guess tokens by lookup|use prompt lookup|draft without a model",
        "cellar serve --drafter lookup",
    ),
    Flag(
        "--quantize",
        "stores the weights in fewer bits. It comes with a later version.",
        "quantize the model|store the weights in fewer bits|use 8 bit weights|use int8|shrink the model|"
        "quantize weights",
        "cellar serve --quantize int8",
    ),
    Flag(
        "--kv-dtype",
        "sets the number type of the KV cache. It comes with a later version.",
        "change the type of the cache|shrink the KV cache|use a smaller cache type|set the cache dtype|"
        "quantize the KV cache|store the cache in fewer bits",
        "cellar serve --kv-dtype bfloat16",
    ),
)  # fmt: skip


def flags(random: Random) -> Conversation:
    """A question about one flag, by its name or by what it is good for."""
    flag = random.choice(FLAGS)
    fact = random.choice(flag.facts)
    subject = pick(random, flag.wishes) if fact.questions is HOW else _name(random, flag.name)
    return converse(random, "flags", fact, pick(random, fact.questions).format(subject))


def _name(random: Random, flag: str) -> str:
    """A flag as people write it: with dashes, quoted, or as words with a noun."""
    roll = random.random()
    if roll < 0.45:
        return flag
    if roll < 0.6:
        return f"the {flag} {random.choice(('flag', 'option', 'flag', 'setting', 'argument', 'parameter'))}"
    if roll < 0.7:
        return f"`{flag}`"
    if roll < 0.75:
        return f"-{flag.lstrip('-')}"
    plain = flag.lstrip("-")
    if roll < 0.85:
        plain = plain.replace("-", " ")
    return f"the {plain} {random.choice(('flag', 'option', 'setting'))}"
