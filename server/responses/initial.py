"""The response object before the first token, with the effective values of the request's settings."""

from __future__ import annotations

from server.generation.chat_turn import ChatTurn
from server.generation.requests import service_tier
from server.schemas.response_items import ResponseBody
from server.schemas.responses import (
    NamespaceTool,
    PromptFields,
    ResponseCustomTool,
    ResponseFunctionTool,
    ResponseRequest,
    plain,
)


def initial_response(body: ResponseRequest, turn: ChatTurn, *, stored: bool) -> ResponseBody:
    """The response of a request: queued in the background, else in progress."""
    background = bool(body.background)
    response = ResponseBody(
        id=turn.id,
        object="response",
        created_at=turn.created,
        completed_at=None,
        status="queued" if background else "in_progress",
        background=background,
        error=None,
        incomplete_details=None,
        frequency_penalty=body.frequency_penalty or 0.0,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=turn.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        presence_penalty=body.presence_penalty or 0.0,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        safety_identifier=body.safety_identifier,
        service_tier=service_tier(turn.body),
        store=stored,
        system_fingerprint=turn.fingerprint,
        temperature=1.0 if body.temperature is None else body.temperature,
        text=_text(body),
        tool_choice=_choice(body),
        tools=[_tool(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        truncation=body.truncation or "disabled",
        usage=None,
        user=body.user,
        metadata=body.metadata or {},
    )
    if body.prompt_cache_options is not None:
        response["prompt_cache_options"] = {"mode": "implicit", "ttl": "30m", **plain(body.prompt_cache_options)}
    return response


def prompt_of_response(response: ResponseBody) -> PromptFields:
    """The settings that determined a response's prompt, without its input."""
    names = ("model", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "truncation")
    return PromptFields.model_validate({name: value for name, value in response.items() if name in names})


def _text(body: ResponseRequest) -> dict[str, object]:
    fields = {} if body.text is None else plain(body.text)
    return {"format": {"type": "text"}, **fields}


def _choice(body: ResponseRequest) -> str | dict[str, object]:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else plain(choice)


def _tool(tool: ResponseFunctionTool | ResponseCustomTool | NamespaceTool) -> dict[str, object]:
    """All fields of a tool, since openai's types require them."""
    if isinstance(tool, NamespaceTool):
        return {**plain(tool), "tools": [_tool(member) for member in tool.tools]}
    if isinstance(tool, ResponseCustomTool):
        return {"format": {"type": "text"}, **plain(tool)}
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", **fields, "strict": tool.strict is not False}
