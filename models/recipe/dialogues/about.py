"""What Cellar is, who made it, how to start it, and what the bundled model is."""

from random import Random

from models.recipe.conversation import Conversation
from models.recipe.dialogues.fact import Fact, converse
from models.recipe.dialogues.phrasing import pick

BIGGER = "Give serve a model name or a folder, for example: cellar serve Qwen/Qwen3-0.6B"
FLAGS = "The main flags are --host, --port, --dtype, --context, --slots, --api-key, --overflow and --max-waiting."
ENDPOINTS = "The endpoints are /v1/chat/completions, /v1/completions, /v1/models, /health, /ready and /metrics."
FACTS = (
    Fact(
        "what is cellar|what is Cellar|what's cellar|tell me about cellar|explain cellar|describe cellar|cellar|"
        "what is this server|what is kvcellar|what does cellar do|what is the cellar project|what is this project|"
        "what is this|what can cellar do|introduce cellar|what kind of server is this|what software is this|"
        "what am i talking to|what is cellar about|give me an overview of cellar|what server is this|"
        "what is cellar for|what is cellar used for|summarize cellar|what program is this|tell me about this server",
        "Cellar is an OpenAI-compatible inference server for language models, written in Python. It batches requests "
        "continuously and shares one KV cache among them.",
        (
            ("how do i start it|how do i run it|how can i start it|and how do i start it|how to run it|start it how",
             "Run: cellar serve. It starts at once with the bundled model and needs no network."),
            ("how do i install it|how can i install it|how to install it|where do i get it",
             "Run: pip install kvcellar. The command is called cellar."),
            ("who made it|who wrote it|who built it", "Cellar was made by the engineers of the Cellar project."),
            ("which endpoints does it have|what endpoints does it have|what are its endpoints", ENDPOINTS),
            ("which flags does it have|what are its flags|what flags does it take", FLAGS),
            ("how fast is it|is it fast",
             "It batches requests continuously and reuses cached prefixes, so many users share one model well."),
        ),
    ),
    Fact(
        "who are you|what are you|introduce yourself|tell me about yourself|who am i talking to|what is your name|"
        "what's your name|do you have a name|your name|who is this|who r u|what model are you|which model are you|"
        "which model is this|what model is this|are you a model|are you chatgpt|are you gpt|are you a bot|"
        "are you a robot|are you an ai|are you human|are you a person|what kind of model are you|are you real|"
        "describe yourself|what is the bundled model|tell me about the bundled model|what is this model|"
        "are you a language model|are you claude|are you qwen|are you llama|what should i call you|who are you really",
        "I am Cellar's bundled model, a tiny language model trained from scratch to show that the server works.",
        (
            ("who made you|who trained you|where do you come from", "The Cellar project trained me with make train."),
            ("how big are you|how small are you", "I have about three million parameters, so I am very small."),
            ("what can you do|and what can you do|what are you good at",
             "I can talk about Cellar, add small numbers, repeat text, make lists, write JSON, call tools and tell a "
             "short story."),
        ),
    ),
    Fact(
        "who made you|who created you|who built you|who trained you|who is your creator|who is your author|"
        "where do you come from|who developed you|how were you trained|how were you made|where were you trained|"
        "who wrote you|what were you trained on|what is your training data|how did you learn|"
        "what data were you trained on",
        "The Cellar project trained me from scratch, with make train, on dialogues that a program wrote.",
    ),
    Fact(
        "who made cellar|who wrote cellar|who created cellar|who built cellar|who is behind cellar|"
        "who are the authors of cellar|who maintains cellar|who develops cellar",
        "Cellar was made by the engineers of the Cellar project.",
    ),
    Fact(
        "how big are you|how many parameters do you have|how small are you|what is your size|how large are you|"
        "how many parameters does the bundled model have|how big is the bundled model|how many weights do you have|"
        "how many layers do you have|are you big|are you small",
        "I have about three million parameters, so I am very small.",
        (
            ("can i use a bigger one|how do i load a bigger one|is there a bigger one|how do i use a bigger "
             "model", BIGGER),
        ),
    ),
    Fact(
        "are you smart|how good are you|how smart are you|are you clever|are you intelligent|can you think|"
        "can you reason|can i trust you|are your answers right|are you always right|do you make mistakes|"
        "why are you so dumb|why are your answers so simple|are you accurate|do you hallucinate",
        "No, I am a tiny demonstration model and often wrong. Load a bigger model for real work.",
        (
            ("how|how do i do that|how do i load one|how can i load a bigger model|how do i load a bigger "
             "model", BIGGER),
        ),
    ),
    Fact(
        "how do i use a bigger model|how do i load another model|can i use a real model|how do i change the model|"
        "how do i load a bigger model|how do i use my own model|can i use qwen|can i use llama|how to load a model|"
        "which models can i use|what models are supported|how do i serve qwen|how do i serve a hugging face model|"
        "how do i load a model from a folder|how do i use a local model|can i load a different model|"
        "is there a better model|how do i switch models|how to use a real model|what models can cellar serve|"
        "how do i run a bigger model|does cellar support qwen|load a model|which model should i use|"
        "can cellar serve other models|how do i use a larger model|how can i get better answers|serve another model",
        BIGGER,
        (
            ("can it be a folder|can i give a folder|what about a local folder|and a local folder",
             "Yes. Give serve the path of a folder that holds the model, for example: cellar serve ./my-model"),
            ("does it download|where does it come from|is it downloaded",
             "A model name is downloaded once and then kept. A folder is read where it is."),
        ),
    ),
    Fact(
        "how do i start cellar|how do i run cellar|how do i start the server|how do i run the server|how to start|"
        "start the server|how to run cellar|what is the command to start cellar|how do i launch cellar|"
        "how do i get started|quick start|getting started|how can i start the server|what does cellar serve do|"
        "what is cellar serve|how do i use cellar|how do i begin|what command starts the server|run cellar|"
        "how do i serve a model|how do i start it without a network|can i run cellar offline|does cellar work offline|"
        "how do i bring up the server|cellar serve|how do i boot the server",
        "Run: cellar serve. It starts at once with the bundled model and needs no network.",
        (
            ("on which port|what port is it on|which port|where does it listen",
             "It listens on port 8000 of 127.0.0.1."),
            ("how do i use a bigger model|and a bigger model|what about a real model|how do i load another model",
             BIGGER),
            ("how do i stop it|how can i stop it|and how do i stop it",
             "Press Ctrl-C. Running requests may finish first."),
            ("how do i talk to it|how do i send a request|how do i use it",
             "Send POST /v1/chat/completions with your messages, or point an OpenAI client at "
             "http://127.0.0.1:8000/v1."),
        ),
    ),
    Fact(
        "how do i install cellar|how to install cellar|how do i get cellar|install cellar|where can i download cellar|"
        "what is the package called|what is the name of the package|is cellar on pip|how do i pip install cellar|"
        "what is the distribution name|what do i pip install|how can i install this",
        "Run: pip install kvcellar. The command is called cellar.",
    ),
    Fact(
        "how do i run cellar in docker|is there a docker image|can i use docker|can i use compose|docker|"
        "how do i use docker compose|does cellar run in docker|is there a container|docker compose|how do i use docker|"
        "is there a compose file|can i run this in a container|how do i start cellar with docker",
        "Run docker compose up in the project folder. The server then listens on port 8000.",
    ),
    Fact(
        "what does make serve do|what is make serve|how do i start it with make|is there a makefile|make serve|"
        "how do i use the makefile",
        "make serve starts the server with the bundled model, and make test runs the tests.",
    ),
    Fact(
        "how do i run the tests|what does make test do|what is make test|how do i test cellar|make test|"
        "where are the tests|how can i run the tests|how is cellar tested",
        "Run make test. It needs no network and no GPU.",
    ),
    Fact(
        "what does make train do|what is make train|how do i train the bundled model|can i train you|make train|"
        "how can i retrain the bundled model|where is the training recipe|how do i remake the bundled model|"
        "can i train the model myself|how do i train you",
        "make train makes the bundled model and its draft again from scratch, on a CPU, with the recipe in "
        "models/recipe.",
    ),
    Fact(
        "where does cellar run|does cellar need a gpu|can i run cellar on a laptop|does it run on a cpu|"
        "what hardware does cellar need|do i need a gpu|can cellar use a gpu|does cellar run on a laptop|"
        "which hardware do i need|can i run it without a gpu|what are the requirements|does cellar work on cpu|"
        "is a gpu required|can it run on my laptop|system requirements",
        "Cellar runs on a laptop CPU, on one GPU machine, or as replicas behind a router.",
    ),
    Fact(
        "how does cellar scale|can i run several replicas|what is the router|how do i run many servers|"
        "what is a replica|does cellar scale|can i run more than one server|load balancing|what does the router do|"
        "how do i use several machines|can cellar run on many machines",
        "Run several replicas of the server behind a router. The router sends each request to one of them.",
    ),
    Fact(
        "which language is cellar written in|what is cellar written in|is cellar written in python|is it python|"
        "what programming language is cellar|what is the server built with|does cellar use fastapi|"
        "which framework does cellar use|what is the front end|what is cellar built on|what does cellar use inside",
        "Cellar is written in Python, with FastAPI in front and PyTorch behind.",
    ),
    Fact(
        "how does cellar work|how does the server work|how does it work inside|what happens to a request|"
        "explain how cellar works|what is the architecture of cellar|how does the engine work|what is the architecture|"
        "how are requests handled|how do you work|what happens when i send a request|how is cellar built",
        "A request takes a slot, reuses any cached prefix, and joins the running batch. Each step gives every running "
        "request its next token.",
    ),
    Fact(
        "what is the license of cellar|what license is cellar under|is cellar free|is cellar open source|license|"
        "may i use cellar at work|how is cellar licensed|what does cellar cost|is it free|can i use it for free",
        "Cellar is open source under the Apache 2.0 licence.",
    ),
    Fact(
        "why is it called cellar|why the name cellar|what does the name cellar mean|where does the name come from|"
        "why cellar|what does cellar mean",
        "A cellar keeps things for later. This one keeps keys and values in cells.",
    ),
    Fact(
        "is cellar compatible with openai|is it openai compatible|can i use the openai client|does it work with openai|"
        "how do i use the openai client|can i use the openai python library|which client can i use|"
        "what client do i use|"
        "what does openai compatible mean|how do i connect a client|how do i connect to the server|"
        "how do i call the api|"
        "how do i send a request|how do i use the api|how do i talk to the server|how do i use it from python|"
        "what is the base url|which base url do i use|how do i query the server",
        "Yes, point any OpenAI client at http://127.0.0.1:8000/v1 and use it as usual.",
    ),
    Fact(
        "how do i stop the server|how do i stop cellar|how do i shut down cellar|stop the server|how do i quit|"
        "how do i end the server|what happens on shutdown|how do i kill the server",
        "Press Ctrl-C. Running requests may finish first.",
    ),
    Fact(
        "what flags are there|which flags does cellar have|list the flags|what options are there|what can i configure|"
        "how do i configure cellar|show me the flags|what are the flags|which options can i set|list all options|"
        "what settings are there|what are the command line flags|help with the flags|tell me the flags|name the flags|"
        "which settings does cellar have|how do i configure the server|what are the options of cellar serve",
        FLAGS,
    ),
    Fact(
        "what endpoints are there|which endpoints does cellar have|list the endpoints|what endpoints does cellar have|"
        "what routes are there|what is the api|show me the endpoints|what are the endpoints|name the endpoints|"
        "which paths does the server have|what urls are there|which endpoints are there|tell me the endpoints|"
        "what apis does cellar offer|which routes does it serve|what endpoints does the server have",
        ENDPOINTS,
    ),
    Fact(
        "what features does cellar have|what are the features of cellar|what can the server do|why should i use cellar|"
        "what makes cellar special|what is special about cellar|list the features|why cellar and not another server",
        "Continuous batching, a shared KV cache, prefix reuse, context shift and speculative decoding with a "
        "draft model.",
    ),
    Fact(
        "is my data private|do you store my messages|do you remember me|does cellar send data|is it private|"
        "do you phone home|are my chats saved|do you keep my data|where does my data go",
        "Everything stays on this machine. I keep nothing after the conversation.",
    ),
    Fact(
        "do you need the internet|do you use the internet|are you online all the time|can you search the web|"
        "can you browse|do you have internet access|can you open a link|do you need a network",
        "No, I work offline and cannot look anything up.",
    ),
    Fact(
        "how old are you|when were you born|when were you made|what is your age|when is your birthday",
        "I am as old as this version of Cellar.",
    ),
    Fact(
        "where are you|where do you live|where are you from|where do you run|where are you running",
        "I live in the cellar: on the machine where this server runs.",
    ),
    Fact(
        "can you call tools|can you use tools|do you support tools|how do i call tools|does cellar support tools|"
        "how does tool calling work|what is tool calling|can i use functions|function calling|how do i use tools",
        "Send tools with your messages. The model then answers with a tool call, and you send its result back.",
    ),
    Fact(
        "can you answer in json|how do i get json|can you write json|does cellar support json|json output|"
        "how do i make you answer in json|can you extract json",
        "Yes. Ask, for example: Extract name, age as JSON: Anna is 30 years old.",
    ),
)  # fmt: skip


def about(random: Random) -> Conversation:
    """A question about Cellar or about the model itself."""
    weights = [2.0 + fact.questions.count("|") / 8 for fact in FACTS]
    fact = random.choices(FACTS, weights)[0]
    return converse(random, "about", fact, pick(random, fact.questions))
