"""Everything that a model of this size cannot know: a large class with honest answers.

The questions are spread wide on purpose. What is not plainly one of the other topics should land here.
"""

from random import Random

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues import words
from models.recipe.dialogues.phrasing import ask, pick

LOAD = "Load a bigger model, for example: cellar serve Qwen/Qwen3-0.6B"
ANSWERS = {
    "knowledge": f"I do not know that, I am too small. {LOAD}",
    "code": f"I am too small to write code. {LOAD}",
    "language": f"I only speak a little English. {LOAD}",
    "writing": f"I am too small to write that. {LOAD}",
    "advice": f"I am too small to give advice on that. {LOAD}",
    "news": f"I do not know what happens in the world, I am only a small file. {LOAD}",
}
SUBJECTS = (
    "quantum physics|gravity|the big bang|black holes|photosynthesis|evolution|DNA|the human brain|the heart|vaccines|"
    "the French revolution|the Roman empire|the second world war|the cold war|Napoleon|Julius Caesar|Cleopatra|"
    "Albert Einstein|Isaac Newton|Marie Curie|Shakespeare|Mozart|Beethoven|Picasso|Leonardo da Vinci|Elvis|"
    "the stock market|inflation|interest rates|bitcoin|blockchain|taxes|insurance|economics|capitalism|democracy|"
    "the president|the government|the constitution|the European Union|climate change|global warming|earthquakes|"
    "volcanoes|the ocean|the rain forest|dinosaurs|mammals|bacteria|viruses|cancer|diabetes|headaches|sleep|yoga|"
    "football|basketball|tennis|the olympic games|chess|poker|Formula One|the world cup|cricket|golf|"
    "pasta|bread|chocolate|coffee|wine|sushi|pizza dough|apple pie|soup|vegan food|cheese|chicken curry|"
    "Linux|Windows|Kubernetes|Java|JavaScript|Rust|C++|SQL|HTML|React|Git|TCP|HTTP|DNS|encryption|databases|"
    "neural networks|transformers|backpropagation|machine learning|deep learning|GPT|ChatGPT|gradient descent|"
    "attention|reinforcement learning|robots|self-driving cars|artificial intelligence|consciousness|philosophy|"
    "Plato|Kant|Buddhism|Christianity|Islam|the meaning of life|love|happiness|death|God|free will|ethics|"
    "algebra|calculus|geometry|prime numbers|the Pythagorean theorem|pi|statistics|probability|logarithms|"
    "Paris|New York|Tokyo|Africa|Antarctica|the Himalayas|the Nile|the moon|Mars|Jupiter|the sun|stars|galaxies|"
    "airplanes|engines|batteries|solar panels|nuclear power|electricity|magnets|lasers|computers|the internet|"
    "Harry Potter|Star Wars|The Lord of the Rings|Batman|Hamlet|the Bible|Netflix|Google|Apple|Microsoft|Tesla|"
    "Amazon|Facebook|Twitter|OpenAI|Elon Musk|Bill Gates|Barack Obama|Queen Elizabeth|Mahatma Gandhi"
)
KNOWLEDGE = (
    "explain {}|what is {}|tell me about {}|how does {} work|who invented {}|what do you know about {}|"
    "why is {} important|"
    "give me facts about {}|who was {}|what are the benefits of {}|describe {}|when was {} discovered|"
    "what is the history of {}|define {}|what do you think about {}|how big is {}|how old is {}|where is {}|"
    "summarize {}|compare {} and {}|what is the difference between {} and {}|is {} better than {}|teach me about {}|"
    "how did {} start|what causes {}|who is {}|what happened to {}|list facts about {}|can you explain {} to me|"
    "explain {} like I am five|how do I learn {}|what makes {} special|write me a summary of {}|when did {} begin"
)
NEWS = (
    "who won the election|what is the news today|what day is it today|what is the date|what time is it|what year is it|"
    "how is the weather|what is the weather today|what is the weather like in {city}|who is the president|"
    "what is the latest news|who won the game yesterday|what is the price of bitcoin|will it rain tomorrow|"
    "who won the world cup in {year}|what happened in {year}|who was president in {year}|where am I right now|"
    "what is the population of {city}|how far is {city} from {other}|what time is it in {city}|"
    "who is the mayor of {city}"
)
CODE = (
    "write a {lang} function that {task}|write {lang} code to {task}|write a program that {task}|can you code|"
    "can you write code|how do I {task} in {lang}|fix this bug|debug my {lang} code|write a {lang} script|"
    "write a web page|write a SQL query|write unit tests|explain this code|can you program|write a class in {lang}|"
    "implement {task} in {lang}|give me a {lang} example|what is wrong with my {lang} code|write a regex for emails|"
    "write a sorting algorithm|def foo(x):|import os|write hello world in {lang}|review my code"
)
LANGUAGES = "Python|Java|JavaScript|Rust|C|C++|Go|SQL|Haskell|TypeScript|Ruby|bash|PHP|Swift"
TASKS = (
    "sorts a list|reverses a string|reads a file|adds two numbers|downloads a page|computes fibonacci numbers|"
    "finds prime numbers|parses JSON|sends an email|draws a circle|counts words|checks a password|sort a list|"
    "read a file|reverse a string|open a socket|parse arguments|train a neural network|scrape a website"
)
LANGUAGE = (
    "translate this to {}|translate hello to {}|say hello in {}|can you speak {}|do you speak {}|"
    "how do you say {word} in {}|"
    "speak {}|answer in {}|what does {word} mean in {}|translate {word} into {}|which languages do you speak|"
    "what languages do you know|write in {}|can you translate|do you understand {}|please translate my text|"
    "can you talk in {}|parlez-vous francais|bonjour|hola|wie geht es dir|guten tag|sprechen sie deutsch|"
    "hola, como estas|comment ca va|buenos dias|was ist das|que es esto|ciao, come stai|konnichiwa|ni hao"
)
TONGUES = "French|German|Spanish|Italian|Chinese|Japanese|Russian|Arabic|Latin|Greek|Portuguese|Hindi|Korean|Turkish"
WRITING = (
    "write a poem|write a poem about {}|write an essay about {}|write a song about {}|write a haiku|"
    "write a letter to {name}|"
    "write an email to my boss|write a blog post about {}|write a book|write a limerick|write a speech about {}|"
    "compose a poem|make up a rhyme|write my homework|write an article about {}|write a cover letter|"
    "rewrite this text|improve my essay|summarize this article|summarize this book|write a tweet about {}|"
    "proofread this|write a recipe for {}|write a script for a film|draw a picture|draw a {thing}|make an image of {}|"
    "sing a song|sing|paint something|write a novel|make a slogan for {}|brainstorm ideas for {}|write a review of {}"
)
ADVICE = (
    "give me legal advice|should I buy stocks|I have a headache, what should I do|what should I eat|what should I cook|"
    "how do I lose weight|how do I get rich|how do I find a job|should I marry {name}|is it healthy to eat {}|"
    "how do I fix my car|my {thing} is broken, what can I do|what should I wear|how can I sleep better|"
    "give me medical advice|how do I make {}|how do I cook {}|recommend a book|recommend a film|what is the best phone|"
    "which car should I buy|plan a trip to {city}|where should I go on holiday|how do I learn to play the guitar|"
    "what should I do today|how do I make friends|how can I be happy|what is the best restaurant in {city}|"
    "book a flight to {city}|order a pizza|call {name}|play some music|set an alarm|open the window|turn on the light|"
    "remind me tomorrow|send an email to {name}|search the web|find a hotel in {city}|buy a {thing} for me"
)
CLASSES = {
    "knowledge": KNOWLEDGE, "news": NEWS, "code": CODE, "language": LANGUAGE, "writing": WRITING, "advice": ADVICE,
}  # fmt: skip


def out_of_scope(random: Random) -> Conversation:
    """A question too large for the model and an answer that says so."""
    kind = random.choices(tuple(CLASSES), (45, 12, 14, 9, 10, 10))[0]
    question = ask(random, _fill(random, kind, pick(random, CLASSES[kind])))
    return Conversation("out of scope", (Message("user", question), Message("assistant", ANSWERS[kind])))


def _fill(random: Random, kind: str, form: str) -> str:
    if kind == "language":
        return form.replace("{word}", words.word(random)).replace("{}", pick(random, TONGUES))
    while "{}" in form:
        form = form.replace("{}", _subject(random), 1)
    return form.format(
        city=words.city(random),
        other=words.city(random),
        year=random.randint(1800, 2030),
        lang=pick(random, LANGUAGES),
        task=pick(random, TASKS),
        name=words.name(random),
        thing=words.thing(random),
    )


def _subject(random: Random) -> str:
    roll = random.random()
    if roll < 0.72:
        return pick(random, SUBJECTS)
    if roll < 0.86:
        return words.made_up(random)
    return words.word(random)
