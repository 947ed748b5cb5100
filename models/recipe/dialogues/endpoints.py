"""The HTTP side: paths, streaming, errors, usage, and the fields of a request."""

from random import Random

from models.recipe.conversation import Conversation
from models.recipe.dialogues.fact import Fact, converse
from models.recipe.dialogues.phrasing import pick

WHAT = (
    "what does {} do|what is {}|what is {} for|explain {}|tell me about {}|what does {} return|how do I use {}|{}|"
    "describe {}|when do I use {}|what can I do with {}|what's {}|how does {} work|what do I get from {}|"
    "what is the {} endpoint|what does the {} endpoint do|what does {} answer|what is at {}|what is {} good for"
)
PATHS = {
    "/v1/chat/completions|POST /v1/chat/completions|chat completions": (
        "POST /v1/chat/completions takes a list of messages and returns the model's answer."
    ),
    "/v1/completions|POST /v1/completions|the completions endpoint": (
        "POST /v1/completions takes a plain prompt and returns the text that follows it."
    ),
    "/v1/models|GET /v1/models|the models endpoint": "GET /v1/models lists the models that the server offers.",
    "/v1/models/{id}|GET /v1/models/{id}": "GET /v1/models/{id} describes one model.",
    "/health|GET /health|the health endpoint": "/health tells whether the server is alive.",
    "/ready|GET /ready|the readiness endpoint": "/ready tells whether the model is loaded and requests are welcome.",
    "/metrics|GET /metrics|the metrics endpoint": "/metrics gives counters and timings in Prometheus text format.",
}
FACTS = (
    Fact(
        "how do i stream|can you stream the answer|how does streaming work|how do I turn on streaming|"
        "what is streaming|"
        "can cellar stream|does cellar support streaming|how do I get tokens as they come|stream the answer|streaming|"
        "how do I stream a response|how do I use streaming|how do I enable streaming|what does stream true do|"
        "how can I stream tokens|does it stream|what is \"stream\": true|how do I stream the output",
        'Send "stream": true. The server then sends each piece as a server-sent event and ends with data: [DONE].',
        (("how does it end|how do I know it is done|what is the last event|how does the stream end",
          "The stream ends with the line data: [DONE]."),),
    ),
    Fact(
        "how does a stream end|what is the last event of a stream|how do I know that a stream is over|what is [DONE]|"
        "what does data: [DONE] mean|when does a stream end|what ends the stream",
        "The stream ends with the line data: [DONE].",
    ),
    Fact(
        "what do errors look like|how are errors reported|what is the shape of an error|how do errors look|"
        "what happens on an error|what does an error look like|error format|how does cellar report errors|"
        "what do I get when something goes wrong|which error format does cellar use",
        "Errors have OpenAI's shape: a JSON object with error, which holds message, type, param and code.",
    ),
    Fact(
        "what is usage|what does usage report|what is cached_tokens|what are cached tokens|how many tokens did I use|"
        "how do I count tokens|what is in usage|explain usage|how do I see how many tokens were cached|"
        "where do I see cached tokens|what does cached_tokens mean|how do I see the token counts|token usage",
        "usage reports prompt and completion tokens, and cached_tokens says how many came from the prefix cache.",
    ),
    Fact(
        "where are the metrics|how do I monitor the server|is there a metrics page|how do I get metrics|"
        "does cellar support prometheus|how can I watch the server|where can I see statistics|prometheus metrics|"
        "how do I see the metrics|monitoring|how do I measure the load",
        "/metrics gives counters and timings in Prometheus text format.",
    ),
    Fact(
        "how do I check that the server is alive|is there a health check|how do I check the health|health check|"
        "how do I know that the server is up|how do I see whether the server runs|where is the health check|"
        "liveness probe|how do I check if the server is running",
        "/health tells whether the server is alive.",
        (("and when is it ready|how do I know that it is ready|what about readiness",
          "/ready tells whether the model is loaded and requests are welcome."),),
    ),
    Fact(
        "how do I know that the model is loaded|is there a readiness check|how do I check that the server is ready|"
        "readiness probe|how do I wait until the server is ready|when is the server ready",
        "/ready tells whether the model is loaded and requests are welcome.",
    ),
    Fact(
        "how do I list the models|which models are loaded|how do I see the models|which endpoint lists the models|"
        "how do I get the model name|where do I see the models|what endpoint gives the models",
        "GET /v1/models lists the models that the server offers.",
    ),
    Fact(
        "which endpoint do I use for chat|how do I chat with the model|how do I send messages|"
        "what is the chat endpoint|"
        "which endpoint takes messages|how do I start a chat|where do I post messages|how do I use the chat api",
        "POST /v1/chat/completions takes a list of messages and returns the model's answer.",
    ),
    Fact(
        "which endpoint completes text|how do I complete a plain prompt|how do I complete text|"
        "where do I send a plain prompt|is there a text completion endpoint|which endpoint takes a prompt",
        "POST /v1/completions takes a plain prompt and returns the text that follows it.",
    ),
    Fact(
        "what happens when the queue is full|what happens when the server is busy|what happens under load|"
        "what happens when too many requests come|why do I get 429|what does status 429 mean|"
        "what if there are too many users|"
        "what happens when all slots are taken|what if all slots are busy",
        "Requests wait in a queue until a slot is free. When the queue is full, new ones are turned away.",
    ),
    Fact(
        "what is max_tokens|what does max_tokens do|how do I limit the answer|how do I get a shorter answer|"
        "how do I limit the length of an answer|explain max_tokens|how long can an answer be|max tokens",
        "max_tokens limits how many tokens the answer may have.",
    ),
    Fact(
        "what is finish_reason|what does finish_reason mean|what does finish_reason length mean|explain finish_reason|"
        "why did the answer stop|what finish reasons are there",
        "finish_reason says why the answer ended: stop at its natural end, length at a limit, tool_calls at a "
        "tool call.",
    ),
)  # fmt: skip


def endpoints(random: Random) -> Conversation:
    """A question about a path or about what goes over the wire."""
    if random.random() < 0.5:
        paths, answer = random.choice(list(PATHS.items()))
        question = pick(random, WHAT).replace("{}", pick(random, paths))
        return converse(random, "endpoints", Fact(WHAT, answer), question)
    fact = random.choice(FACTS)
    return converse(random, "endpoints", fact, pick(random, fact.questions))
