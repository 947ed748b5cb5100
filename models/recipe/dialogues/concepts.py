"""The words of the trade as Cellar means them: cell, slot, prefix reuse, temperature."""

from random import Random

from models.recipe.conversation import Conversation
from models.recipe.dialogues.fact import Fact, converse
from models.recipe.dialogues.phrasing import pick

WHAT = (
    "what is {}|what are {}|explain {}|how does {} work|what does {} mean|tell me about {}|what is {} in Cellar|"
    "define {}|"
    "can you explain {}|why {}|describe {}|what do you mean by {}|{}|I do not understand {}|what's {}|"
    "give me a definition of {}|does Cellar have {}|does Cellar support {}|what is {} good for|why do I need {}|"
    "what is the idea of {}|what is meant by {}|how does Cellar use {}|what does {} do|explain {} to me|"
    "how does {} work in Cellar|what is the point of {}|does Cellar use {}|please explain {}"
)
FACTS = (
    Fact(
        "a cell|cells|the cells|cell",
        "A cell holds the keys and values of one token in the shared KV cache.",
        (("how many cells are there|how many are there",
          "Slots times context: one cell for each token that may be held."),),
    ),
    Fact(
        "a slot|slots|the slots|slot",
        "A slot is one sequence's place in the shared cache. Each running request holds one slot.",
        (("how many are there|how do I change how many there are|how do I set the number|which flag sets it",
          "Use --slots, for example: cellar serve --slots 8"),),
    ),
    Fact(
        "prefix reuse|the prefix cache|prefix caching|copy_prefix|prompt caching|prefix sharing|reuse of prefixes|"
        "the cached prefix",
        "When a prompt begins like an earlier one, copy_prefix shares its cached cells, and only the rest is computed.",
        (("how do I see it|how do I know that it worked|where do I see it",
          "usage reports prompt and completion tokens, and cached_tokens says how many came from the prefix cache."),),
    ),
    Fact(
        "context shift|the context shift|context shifting|shifting the context|a full context|shift",
        "When a context is full, context shift drops the oldest tokens, moves the rest back, and generation goes on.",
        (("how do I turn it on|how do I enable it|which flag turns it on|which flag is that",
          "Use --overflow, for example: cellar serve --overflow shift"),),
    ),
    Fact(
        "continuous batching|batching|the batch|a batch|continuous batches|dynamic batching|the running batch",
        "Continuous batching lets requests join and leave the running batch at every step, so nobody waits for "
        "the slowest.",
    ),
    Fact(
        "chunked prefill|prefill|chunking|prefill chunks|chunked prompts|prompt processing",
        "Chunked prefill reads a long prompt in pieces between decoding steps, so running answers do not stall.",
    ),
    Fact(
        "speculative decoding|speculation|speculative sampling|drafting|speculative execution",
        "A small draft model guesses several tokens, and the target checks them all in one pass and keeps the "
        "right ones.",
        (("does it change the answer|is the answer the same|does it change the output",
          "No. The target checks every token, so the answer stays the same."),
         ("how do I turn it on|which flag turns it on|how do I enable it",
          "Use --draft-model, for example: cellar serve --draft-model ./draft")),
    ),
    Fact(
        "a draft model|the draft model|draft models|a draft|the draft|the drafter",
        "A draft model is a small model that guesses what the target model will say next. It shares its tokenizer.",
    ),
    Fact(
        "the target model|a target model|the target|target models",
        "The target model is the one whose answers you get. It checks what the draft model guesses.",
    ),
    Fact(
        "the KV cache|a KV cache|KV cache|the cache|the key value cache|kv caching|the shared cache",
        "The KV cache keeps the keys and values of tokens already read, so that they are not computed again.",
    ),
    Fact(
        "temperature|the temperature|temperature 0|sampling temperature|temperature 1",
        "temperature sets how random the answer is. 0 always takes the likeliest token.",
    ),
    Fact(
        "top_p|top p|nucleus sampling|top-p",
        "top_p keeps only the likeliest tokens whose chances add up to p, and samples among them.",
    ),
    Fact(
        "top_k|top k|top-k",
        "top_k keeps only the k likeliest tokens and samples among them.",
    ),
    Fact(
        "stop strings|a stop string|stop|stop sequences|a stop sequence|the stop field|stop words",
        "A stop string ends the answer as soon as it appears. It is not part of the answer.",
    ),
    Fact(
        "a seed|the seed|seed|seeds|seeded sampling|reproducible sampling|repeatable sampling",
        "A seed makes sampled text repeatable, whatever else runs in the batch.",
    ),
    Fact(
        "a token|tokens|token|the tokens",
        "A token is a piece of text, a word or a part of one. Models read and write tokens.",
    ),
    Fact(
        "a tokenizer|the tokenizer|tokenization|tokenizers",
        "A tokenizer cuts text into tokens and joins tokens back into text.",
    ),
    Fact(
        "the context|a context|context length|the context window|context|the context length|context size",
        "The context is all the tokens of one sequence, prompt and answer together.",
        (("how do I set it|how do I change it|which flag sets it|how do I make it longer",
          "Use --context, for example: cellar serve --context 4096"),),
    ),
    Fact(
        "a prompt|the prompt|prompts|prompt",
        "A prompt is the text that the model reads before it answers.",
    ),
    Fact(
        "a chat template|the chat template|chat templates|ChatML",
        "A chat template turns a list of messages into the one text that the model reads.",
    ),
    Fact(
        "a system prompt|the system prompt|system prompts|the system message|a system message",
        "A system prompt is the first message. It tells the model how to behave.",
    ),
    Fact(
        "decoding|generation|token generation|inference|autoregressive decoding",
        "Decoding makes the answer one token at a time. Each new token is read again before the next.",
    ),
    Fact(
        "a sequence|sequences|the sequences|sequence",
        "A sequence is one prompt and its answer, as a row of tokens in a slot.",
    ),
    Fact(
        "the scheduler|scheduling|a scheduler|the queue|waiting requests",
        "The scheduler decides at every step which requests decode and which prompts are read.",
    ),
    Fact(
        "quantization|quantized weights|int8|quantizing",
        "Quantization stores weights in fewer bits, so that they need less memory and time.",
    ),
    Fact(
        "latency|time to first token|TTFT|throughput|tokens per second",
        "Latency is how long you wait for a token, throughput is how many tokens all users get in a second.",
    ),
)  # fmt: skip


def concepts(random: Random) -> Conversation:
    """A question about one notion, by any of its names."""
    fact = random.choice(FACTS)
    question = pick(random, WHAT).format(pick(random, fact.questions))
    if question.startswith("what are") and random.random() < 0.5:
        question = question.replace("what are", "what is", 1)
    return converse(random, "concepts", fact, question)
