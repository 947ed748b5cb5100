// Calls of the server's API.
import { promptMessages } from './prompt';
import type { Capabilities, ChatSettings, EngineState, Failure, Message, ServedModel, ToolCall } from './types';

const KEY = 'cellar.key';

export function apiKey(): string {
  return sessionStorage.getItem(KEY) ?? '';
}

export function setApiKey(key: string): void {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class ApiFailure extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly field: string | null = null,
    readonly code: string = '',
    readonly phase: string = '',
    readonly fitting?: number,
  ) {
    super(message);
  }
}

interface ErrorBody {
  error?: {
    message?: string;
    param?: string | null;
    code?: string;
    phase?: string;
    n_prompt_tokens?: number;
    n_ctx?: number;
  };
}

async function call(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (apiKey()) headers.set('Authorization', `Bearer ${apiKey()}`);
  let response: Response;
  try {
    response = await fetch(path, { ...init, headers, cache: 'no-store', credentials: 'omit' });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiFailure(0, 'The server does not answer.');
  }
  if (response.ok) return response;
  const body = (await response.json().catch(() => ({}))) as ErrorBody;
  const { message, param, code, phase, n_prompt_tokens: tokens, n_ctx: context } = body.error ?? {};
  const fitting = code === 'context_length_exceeded' ? (context ?? 1) / (tokens ?? 1) : undefined;
  throw new ApiFailure(response.status, message ?? response.statusText, param ?? null, code, phase, fitting);
}

// The models that generate: embedding models have no slots, and a model that is not loaded has no `meta`.
export async function readModels(): Promise<ServedModel[]> {
  const body = (await (await call('/v1/models')).json()) as { data: ServedModel[] };
  return body.data.filter((model) => (model.meta ? model.meta.n_slots : model.status));
}

// `name`: one of several models, which is not loaded for it; empty for a server of one model.
export async function readCapabilities(name: string): Promise<Capabilities> {
  const body = (await (await readOf(name, '/v1/capabilities')).json()) as { model: Capabilities };
  return body.model;
}

export async function readEngine(name: string, signal: AbortSignal): Promise<EngineState> {
  return (await (await readOf(name, '/v1/engine', { signal })).json()) as EngineState;
}

function readOf(name: string, path: string, init: RequestInit = {}): Promise<Response> {
  if (!name) return call(path, init);
  return call(`${path}?model=${encodeURIComponent(name)}`, { ...init, headers: { 'X-Load': 'never' } });
}

export function failureOf(error: unknown): Failure {
  if (!(error instanceof ApiFailure)) return { title: 'Error', message: String(error), field: null };
  const title = error.status ? `Error ${error.status}` : 'No connection';
  const failure = { title, message: error.message, field: error.field };
  return error.fitting === undefined ? failure : { ...failure, fitting: error.fitting };
}

// What a delta of an answer adds.
export interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
}

export interface Chunk {
  choices: { delta: Delta; finish_reason: string | null }[];
  usage?: {
    prompt_tokens: number;
    completion_tokens: number;
    context_shifts?: number;
    prompt_tokens_details?: { cached_tokens?: number };
  } | null;
  timings?: {
    predicted_per_second?: number;
    predicted_n?: number;
    predicted_ms?: number;
    draft_n?: number;
    draft_n_accepted?: number;
  };
}

// Of a completion: what it adds to the text.
export interface TextChunk {
  choices: { text: string }[];
}

type Event<Kind> = Kind & { error?: { message: string; param?: string | null; code?: string } };

const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'max_tokens', 'seed'] as const;

function parsed(text: string, name: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new ApiFailure(400, `${name} in Settings is not JSON: ${(error as Error).message}.`, null, 'invalid_json');
  }
}

type Body = Record<string, unknown>;

function samplingBody(settings: ChatSettings): Body {
  const body: Body = { stream: true };
  if (settings.model) body['model'] = settings.model;
  for (const name of NUMBERS) if (settings[name].trim()) body[name] = Number(settings[name]);
  if (settings.overflow) body['overflow'] = settings.overflow;
  return body;
}

export function completionBody(prompt: string, settings: ChatSettings): Body {
  return { ...samplingBody(settings), prompt };
}

// With the images that are still stored, by `urlOf` their ids.
export function requestBody(messages: Message[], settings: ChatSettings, urlOf: Map<string, string>): Body {
  const body: Body = { ...samplingBody(settings), stream_options: { include_usage: true } };
  if (settings.schema.trim()) {
    const schema = parsed(settings.schema, 'The JSON schema');
    body['response_format'] = { type: 'json_schema', json_schema: { name: 'answer', strict: true, schema } };
  }
  if (settings.tools.trim()) body['tools'] = parsed(settings.tools, 'The list of tools');
  const system = settings.system.trim() ? [{ role: 'system', content: settings.system }] : [];
  body['messages'] = [...system, ...promptMessages(messages).map((message) => wireMessage(message, urlOf))];
  return body;
}

function wireMessage(message: Message, urlOf: Map<string, string>): Record<string, unknown> {
  if (message.role === 'tool') return { role: 'tool', tool_call_id: message.callId, content: message.content };
  const calls = message.calls?.map((one: ToolCall) => ({
    id: one.id,
    type: 'function',
    function: { name: one.name, arguments: one.arguments },
  }));
  return { role: message.role, content: wireContent(message, urlOf), ...(calls?.length ? { tool_calls: calls } : {}) };
}

function wireContent({ content, images = [] }: Message, urlOf: Map<string, string>): unknown {
  const urls = images.flatMap(({ id }) => urlOf.get(id) ?? []);
  if (!urls.length) return content;
  const parts = urls.map((url) => ({ type: 'image_url', image_url: { url } }));
  return content ? [...parts, { type: 'text', text: content }] : parts;
}

export function streamChat(body: Body, signal: AbortSignal): AsyncGenerator<Chunk> {
  return stream<Chunk>('/v1/chat/completions', body, signal);
}

export function streamCompletion(body: Body, signal: AbortSignal): AsyncGenerator<TextChunk> {
  return stream<TextChunk>('/v1/completions', body, signal);
}

// The chunks of a streamed answer. Aborting the signal closes the connection, which frees the slot of the server.
async function* stream<Kind>(path: string, body: Body, signal: AbortSignal): AsyncGenerator<Kind> {
  const headers = { 'Content-Type': 'application/json' };
  const response = await call(path, { method: 'POST', headers, body: JSON.stringify(body), signal });
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  for (;;) {
    const { done, value } = await reader.read().catch((error: unknown) => {
      if (signal.aborted) throw error;
      throw new ApiFailure(0, 'The connection ended before the answer did.');
    });
    if (done) throw new ApiFailure(0, 'The connection ended before the answer did.');
    text += value;
    const events = text.split('\n\n');
    text = events.pop() ?? '';
    for (const event of events) {
      const data = event.startsWith('data: ') ? event.slice(6) : '';
      if (data === '[DONE]') return;
      if (!data) continue;
      const chunk = JSON.parse(data) as Event<Kind>;
      if (chunk.error) throw new ApiFailure(500, chunk.error.message, chunk.error.param ?? null, chunk.error.code);
      yield chunk as Kind;
    }
  }
}
