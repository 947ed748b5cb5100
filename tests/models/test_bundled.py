"""The bundled pair: it loads offline, is small, and answers the questions of its documentation."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.held_out import DRAFT, MODELS, TARGET
from tests.models.answers import Model, Prompt

FOLDERS = (TARGET, DRAFT)
FILES = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip
LARGEST_BYTES = 20_000_000
LEAST_AGREEMENT = 0.8
# What a visitor asks first, and what the answer must hold.
QUESTIONS = {
    "Hi!": "Hello!",
    "hello": "Hello!",
    "What is Cellar?": "OpenAI-compatible inference server",
    "what is cellar": "OpenAI-compatible inference server",
    "Who are you?": "bundled model",
    "How do I start Cellar?": "cellar serve",
    "How do I use a bigger model?": "cellar serve Qwen/Qwen3-0.6B",
    "What does --slots do?": "how many sequences run at once",
    "What does --overflow do?": "shift drops the oldest tokens",
    "What is a slot?": "place in the shared cache",
    "What is speculative decoding?": "draft model guesses",
    "What does /metrics return?": "Prometheus",
    "How do I stream?": "data: [DONE]",
    "Can you speak French?": "a little English",
    "Who is the president of France?": "only a small file",
    "Thank you!": "welcome",
    "What is 2+2?": "= 4.",
    "What is 2 + 3?": "2 + 3 = 5.",
    "What is the capital of France?": "Paris",
    "My name is Ada. What is my name?": "Ada",
    "What is the opposite of hot?": "cold",
    "Repeat: the cat": "the cat",
    "Repeat after me: the quick brown fox": "the quick brown fox",
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the local time in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def target() -> Model:
    return Model(TARGET)


@pytest.fixture(scope="module")
def draft() -> Model:
    return Model(DRAFT)


@pytest.fixture(scope="module")
def answers(target: Model) -> dict[str, str]:
    """The greedy answers to all questions, computed side by side."""
    prompts = [Prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    return {question: answer.text for question, answer in zip(QUESTIONS, target.answer(prompts), strict=True)}


def answer_to(model: Model, *turns: str, system: str = "") -> str:
    """The greedy answer to the last turn, after answers to the earlier ones."""
    messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    answer = ""
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answer = model.answer([Prompt(messages)])[0].text
        messages.append({"role": "assistant", "content": answer})
    return answer


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_files_are_complete_small_and_readable(folder: Path) -> None:
    """Each folder holds what transformers and a reader need, far below the size of a wheel's patience."""
    files = {file.name: file.stat() for file in folder.iterdir()}

    assert set(files) >= FILES
    assert sum(file.st_size for file in files.values()) < LARGEST_BYTES
    assert all(file.st_mode & 0o444 == 0o444 for file in files.values())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_files_load_offline(folder: Path) -> None:
    """The plain auto classes load a folder, and model, tokenizer and configuration agree about the end of a turn."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    assert "LlamaForCausalLM" == type(model).__name__
    assert torch.bfloat16 == model.dtype
    assert len(tokenizer) == model.config.vocab_size
    assert "<|im_end|>" == tokenizer.eos_token
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id


def test_both_share_one_tokenizer() -> None:
    """A draft's guesses mean the same to the target."""
    first, second = ((folder / "tokenizer.json").read_bytes() for folder in FOLDERS)

    assert first == second


def test_tool_marks_survive_decoding(target: Model) -> None:
    """A tool call is text and stays when special tokens are skipped; the end of turn goes."""
    tokenizer = target.tokenizer
    ids = tokenizer.encode("<tool_call>\n{}\n</tool_call><|im_end|>", add_special_tokens=False)

    assert "<tool_call>\n{}\n</tool_call>" == tokenizer.decode(ids, skip_special_tokens=True)
    assert 1 == len(tokenizer.encode("<tool_call>", add_special_tokens=False))


def test_digits_stand_alone(target: Model) -> None:
    """Every digit is a token of its own."""
    assert ["2", "0", "4", "8"] == target.tokenizer.tokenize("2048")


def test_any_text_survives_the_tokenizer(target: Model) -> None:
    """Bytes that training never saw come back unchanged."""
    text = "naïve 日本語 🙂\t\r\n  two  spaces"

    assert text == target.tokenizer.decode(target.tokenizer.encode(text, add_special_tokens=False))


def test_the_template_renders_every_role(target: Model) -> None:
    """System, tools, calls with arguments as text or object, results and content parts all find their place."""
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What time is it in Oslo?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": '{"time": "9:30"}'},
    ]

    text = target.tokenizer.apply_chat_template(messages, tools=[TIME], add_generation_prompt=True, tokenize=False)

    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(TIME) in text
    assert "<|im_start|>user\nWhat time is it in Oslo?<|im_end|>\n" in text
    assert '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>' in text
    assert '<tool_response>\n{"time": "9:30"}\n</tool_response>' in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered(answers: dict[str, str], question: str) -> None:
    """What a visitor asks first is answered right, greedily and to its end."""
    assert QUESTIONS[question] in answers[question]


def test_a_system_prompt_does_not_hurt(target: Model) -> None:
    """The usual system prompt does not change the answer."""
    question = "What does --slots do?"

    assert answer_to(target, question) == answer_to(target, question, system="You are a helpful assistant.")


def test_a_fact_is_remembered(target: Model) -> None:
    """A name from an earlier turn."""
    assert "Anna" in answer_to(target, "My name is Anna.", "What is 2 + 2?", "What is my name?")


def test_facts_are_extracted_as_json(target: Model) -> None:
    """The answer parses and holds the right values, numbers as numbers."""
    answer = answer_to(target, "Extract name, age as JSON: Anna is 30 years old and works as a baker in Paris.")

    assert {"name": "Anna", "age": 30} == json.loads(answer)


def test_an_offered_tool_is_called(target: Model) -> None:
    """The right one of two tools is called with the right argument."""
    asked = Prompt([{"role": "user", "content": "What is the weather in Oslo?"}], (TIME, WEATHER))

    answer = target.answer([asked])[0].text

    body = answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert {"name": "get_weather", "arguments": {"city": "Oslo"}} == json.loads(body)


def test_a_greeting_calls_no_tool(target: Model) -> None:
    """A greeting is answered by a greeting, with any tools."""
    answer = target.answer([Prompt([{"role": "user", "content": "Hello!"}], (WEATHER,))])[0].text

    assert answer.startswith("Hello!")


def test_the_draft_agrees_with_the_target(target: Model, draft: Model) -> None:
    """Of the target's greedy tokens the draft guesses most."""
    questions = ("What is Cellar?", "What does --port do?", "What is context shift?", "Repeat: red green blue", "Hi")
    said_by_target = target.answer([Prompt([{"role": "user", "content": question}]) for question in questions])

    agreed = [match for answer in said_by_target for match in draft.agreement(answer)]

    assert sum(agreed) / len(agreed) >= LEAST_AGREEMENT


def test_the_evaluation_is_of_these_files() -> None:
    """The numbers in the cards meet the floors the project sets itself."""
    record = json.loads((MODELS / "evaluation.json").read_text(encoding="utf-8"))

    assert record["agreement"]["share"] >= 0.85
    assert (
        min(row["right"] / row["asked"] for topic, row in record["scores"].items() if topic in ("about", "flags")) > 0.9
    )
