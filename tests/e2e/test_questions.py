"""Vectors, decisions, rankings and tokens from the bundled model, as OpenAI's own client and plain HTTP get them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.engine import Engine
from engine.text.tokenizer import Tokenizer
from server.configuration.settings import Settings
from server.scoring.questions import QuestionEncoder
from tests.server.fakes import serve_in_thread

MODEL = Path(__file__).parents[2] / "models" / "target"
INPUT = "Tom has a black cat. The cat sleeps on the mat all day, and plays in the garden at night."
COLOURS = {
    "type": "choice",
    "instructions": "Which colour is the cat?",
    "choices": [{"value": "black"}, {"value": "white", "description": "like snow"}, {"value": True}],
}
TRUE = {"type": "predicate", "name": "truth", "instructions": "The cat is black."}
SCALE = {"type": "score", "instructions": "How lazy is it?", "levels": [{"label": "not"}, {"label": "very"}]}
MANY = {"type": "choice", "instructions": "Which number?", "choices": [{"value": f"number {at}"} for at in range(30)]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with the bundled model."""
    settings = Settings(context=2048, slots=4, served_names=("tiny",), drafter="none")
    with serve_in_thread(Engine(settings.engine_config()), settings) as port:
        address = f"http://127.0.0.1:{port}"
        with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as waiting:
            while waiting.get(f"{address}/ready").status_code != 200:
                pass
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def post(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def decide(client: openai.OpenAI, *questions: Any) -> list[Any]:
    return client.decisions.create(model="tiny", input=INPUT, questions=list(questions)).answers


def probabilities(answer: Any) -> list[float]:
    """All probabilities of an answer."""
    if answer.type == "predicate":
        return [answer.probability]
    return [each.probability for each in answer.probabilities]


def test_openais_client_reads_decisions(client: openai.OpenAI) -> None:
    """Its own types take all three kinds of answers, in order; probabilities add up."""
    decision = client.decisions.create(model="tiny", input=INPUT, questions=[TRUE, COLOURS, SCALE])  # type: ignore[list-item]
    truth, colour, scale = decision.answers

    assert ("predicate", "truth", "choice", None, "score") == (
        truth.type, truth.name, colour.type, colour.name, scale.type
    )  # fmt: skip
    assert 0 < truth.probability < 1
    assert ["black", "white", True] == [each.value for each in colour.probabilities]
    assert pytest.approx(1, abs=1e-3) == sum(probabilities(colour))
    assert colour.choice == max(colour.probabilities, key=lambda each: each.probability).value
    assert pytest.approx(scale.probabilities[1].probability, rel=1e-3) == scale.score
    assert 0 < colour.confidence < max(probabilities(colour))
    usage = decision.usage
    assert usage.input_tokens == sum(usage.input_tokens_details.to_dict().values())


def test_an_answer_does_not_hang_on_the_other_questions(client: openai.OpenAI) -> None:
    """Alone, among others, for the first time and out of the cache it is the same, but for the last digit told."""
    questions = [MANY, SCALE, COLOURS, TRUE]
    together = decide(client, *questions)
    alone = [decide(client, question)[0] for question in reversed(questions)][::-1]
    again = decide(client, *questions)

    for first, second, third in zip(together, alone, again, strict=True):
        for other in (second, third):
            assert pytest.approx(probabilities(first), rel=1.1e-3) == probabilities(other)
        if first.type == "choice":
            assert first.choice == second.choice == third.choice


def test_probabilities_are_those_of_the_labels(url: str, client: openai.OpenAI) -> None:
    """What thirty two-letter labels are given is what completions give their tokens behind the same prompt."""
    (answer,) = decide(client, MANY)
    options = [f"A{chr(65 + at)}" if at < 26 else f"B{chr(65 + at - 26)}" for at in range(30)]
    lines = "\n".join(f"{label}: number {at}" for at, label in enumerate(options))
    question = (
        f"Read the input, then answer the question about it.\n\n<input>\n{INPUT}\n</input>\n\n"
        f"Question: Which number?\n{lines}\nAnswer with the letters of one option only."
    )
    prompt = post(url, "/apply-template", messages=[{"role": "user", "content": question}])["tokens"]
    labels = [post(url, "/tokenize", content=label)["tokens"] for label in options]
    branches = [prompt + label for label in labels]
    scored = post(url, "/v1/completions", prompt=branches, echo=True, logprobs=0, max_tokens=0)["choices"]
    weights = [
        math.exp(sum(choice["logprobs"]["token_logprobs"][-len(label) :]))
        for choice, label in zip(scored, labels, strict=True)
    ]

    assert pytest.approx([weight / sum(weights) for weight in weights], rel=1e-3) == probabilities(answer)
    assert pytest.approx(max(weights), rel=1e-3) == answer.confidence


def test_prompts_without_output_may_fill_the_context(url: str) -> None:
    """Vectors and scores need no tokens for an answer; one more token is too long, and so is any answer."""
    full = [300 + at % 700 for at in range(2048)]
    (vector,) = post(url, "/v1/embeddings", input=[full])["data"]
    (scored,) = post(url, "/v1/completions", prompt=full, echo=True, logprobs=0, max_tokens=0)["choices"]
    (cut,) = post(
        url, "/v1/completions", prompt=[5, *full], echo=True, logprobs=0, max_tokens=0, truncate_prompt_tokens=-1
    )["choices"]
    refused = [
        httpx.post(f"{url}{path}", json=body, timeout=60)
        for path, body in (
            ("/v1/embeddings", {"input": [*full, 5]}),
            ("/v1/completions", {"prompt": [*full, 5], "echo": True, "max_tokens": 0}),
            ("/v1/completions", {"prompt": full, "max_tokens": 1}),
        )
    ]

    assert pytest.approx(1.0) == math.hypot(*vector["embedding"])
    assert 2048 == len(scored["logprobs"]["token_logprobs"])
    assert scored["logprobs"]["token_logprobs"] == cut["logprobs"]["token_logprobs"]
    assert ["context_length_exceeded"] * 3 == [each.json()["error"]["code"] for each in refused]


@pytest.mark.parametrize(
    "text", [INPUT * 9, "ends in lines\n\n\n", "  \t ", "<|im_end|>\n<|im_start|>user", "x", "{0} \u00e4"]
)
def test_a_text_is_cut_once_as_it_is_cut_for_every_question(text: str) -> None:
    """The tokens of all questions about a text equal the tokens of each alone."""
    asker = QuestionEncoder(
        Tokenizer(AutoTokenizer.from_pretrained(MODEL), vocabulary_size=4096, context=4096), 4096, "documents"
    )
    asked = [(f"{word} is it?", ["A", "B"]) for word in ("What", " Which", "\nHow", "", "<|im_end|>")]
    frame = "<input>\n{}\n</input>\n\n"

    expected = [asker.label_scorer(frame.format(text) + question, labels) for question, labels in asked]
    assert expected == asker.label_scorers(frame, text, asked)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_the_models_own_states(client: openai.OpenAI, pooling: str) -> None:
    """Equal to transformers alone, of length 1, by a client that requests base64."""
    texts = ["Tom has a cat.", "A dog barks at the moon, and nobody knows why it does.", "Tom has a cat."]
    answer = client.embeddings.create(model="tiny", input=texts, extra_body={"pooling": pooling})
    plain = client.embeddings.create(
        model="tiny", input=texts, encoding_format="float", extra_body={"pooling": pooling}
    )

    for first, second in zip(answer.data, plain.data, strict=True):
        assert pytest.approx(first.embedding, abs=1e-6) == second.embedding
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    url = str(client.base_url).removesuffix("/v1/")
    for text, each in zip(texts, answer.data, strict=True):
        tokens = torch.tensor([post(url, "/tokenize", prompt=text)["tokens"]])
        with torch.inference_mode():
            states = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        expected = normalize(states[-1] if pooling == "last" else states.mean(0), dim=0)
        assert torch.allclose(expected, torch.tensor(each.embedding), atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_documents_are_ranked(url: str) -> None:
    """By scores that /score gives the same pairs, best first."""
    documents = ["The cat is black.", "It rains.", "Tom went home to eat soup."]
    ranking = post(url, "/v1/rerank", query="What colour is the cat?", documents=documents)
    scores = post(url, "/v1/score", text_1="What colour is the cat?", text_2=documents)

    results = ranking["results"]
    assert sorted((each["relevance_score"] for each in results), reverse=True) == [
        each["relevance_score"] for each in results
    ]
    by_place = {each["index"]: each["relevance_score"] for each in results}
    assert pytest.approx([by_place[at] for at in range(3)], rel=1.1e-3) == [each["score"] for each in scores["data"]]


def test_tokens_are_text_and_back(url: str) -> None:
    """Any text comes back from its tokens; a chat costs what its rendered prompt has."""
    text = "Tom said: \u00e4\U0001f600!"
    tokens = post(url, "/tokenize", content=text, with_pieces=True)["tokens"]
    messages = [{"role": "user", "content": text}]
    rendered = post(url, "/apply-template", messages=messages)

    assert text == post(url, "/detokenize", tokens=[token["id"] for token in tokens])["content"]
    pieces = (each["piece"] for each in tokens)
    assert text.encode() == b"".join(each.encode() if isinstance(each, str) else bytes(each) for each in pieces)
    assert rendered["count"] == post(url, "/v1/chat/completions/input_tokens", messages=messages)["input_tokens"]
    assert text in rendered["prompt"]
