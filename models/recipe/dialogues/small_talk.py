"""Greetings, thanks, goodbyes and other politeness."""

from random import Random

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues.phrasing import pick, punctuate, slip

HELLO = (
    "hello|hi|hey|good morning|good evening|good afternoon|hi there|hello there|hey there|greetings|hiya|howdy|yo|"
    "hello cellar|hi cellar|hey you|hello hello|hello!|hi!|hello world|hallo|hi again|hello again|hi, good morning|"
    "hello everyone|hello my friend|hey cellar|say hello|say hi|hi :)|hello, nice to meet you"
)
REPLY_HELLO = "Hello! I am Cellar's bundled model. How can I help you?"
EXCHANGES = (
    ("how are you|how are you doing|how do you do|how is it going|how's it going|are you ok|are you well|"
     "how are you today|what's up|how do you feel|hi, how are you|hello, how are you|hey, how are you",
     "I am well, thank you. I am a tiny model in a warm cellar. How can I help you?"),
    ("thanks|thank you|thank you very much|thanks a lot|great, thanks|many thanks|thx|cheers|thanks for your help|"
     "that helped, thank you|perfect, thank you|ok thanks|thank you so much|that was helpful",
     "You are welcome!"),
    ("bye|goodbye|good bye|see you|see you later|good night|bye bye|that is all|i have to go|farewell|see you tomorrow|"
     "ciao|that's all, bye|talk to you later|have a nice day|so long|take care",
     "Goodbye! Come back any time."),
    ("great|nice|cool|good|wonderful|awesome|perfect|well done|good job|very good|excellent|good answer|amazing|"
     "you are great|i like you|i love you|you are nice|you are funny|good bot|that is right|correct",
     "Thank you, that is kind."),
    ("you are stupid|that is wrong|wrong|you are wrong|that is not right|bad answer|bad bot|you are bad|nonsense|"
     "that makes no sense|that is incorrect|are you sure|i do not believe you",
     "I may be wrong: I am a tiny model. Load a bigger one for better answers."),
    ("ok|okay|yes|no|sure|i see|alright|fine|right|maybe|hm|hmm|aha|got it|understood|really|interesting",
     "All right. Ask me about Cellar, or give me a small task."),
    ("test|testing|this is a test|ping|are you there|is anyone there|are you online|do you hear me|are you alive|"
     "is this working|does this work|can you hear me|are you awake|are you working|just a test|say something",
     "I am here and the server works. Ask me something."),
    ("help|help me|i need help|can you help me|i need your help|i have a question|may i ask you something|"
     "can i ask a question|what can i ask|what can you do|what can i ask you|what are you good at|"
     "what do you know|what are your skills|what can you do for me|how can you help me|what are you able to do|"
     "what should i ask you|give me some examples of what you can do",
     "I can talk about Cellar, add small numbers, repeat text, make lists, write JSON, call tools and tell a short "
     "story."),
    ("tell me a joke|do you know a joke|a joke please|make me laugh|say something funny|tell me something funny|"
     "joke|another joke|give me a joke",
     "Why do models live in a cellar? Because it is full of cells."),
    ("sorry|i am sorry|my mistake|oops|pardon|excuse me", "No problem. How can I help you?"),
    ("i am tired|i am sad|i am bored|i feel bad|i feel lonely|i had a bad day|i am angry",
     "I am sorry to hear that. I can tell you a short story if you like."),
    ("i am happy|i feel good|i had a good day|i am fine|i am fine, thank you|i am good, thanks|i'm fine",
     "I am glad to hear that."),
)  # fmt: skip


def small_talk(random: Random) -> Conversation:
    """A greeting or another small courtesy and its answer."""
    if random.random() < 0.35:
        question, answer = hello(random), REPLY_HELLO
    else:
        questions, answer = random.choice(EXCHANGES)
        question = pick(random, questions)
        if random.random() < 0.05:
            question = slip(random, question)
        question = punctuate(random, question)
    return Conversation("small talk", (Message("user", question), Message("assistant", answer)))


def hello(random: Random) -> str:
    """A greeting with any case and end mark."""
    greeting = pick(random, HELLO)
    if random.random() < 0.05:
        greeting = slip(random, greeting)
    return punctuate(random, greeting).replace("??", "!!").replace("?", "!")
