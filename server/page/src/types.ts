// The data of the page: conversations, and the parts of the API's bodies that it reads.

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

// Times in milliseconds. `firstToken` is measured here, from the request to the first text; the other figures are the server's.
export interface AnswerStats {
  firstToken: number | null;
  tokens: number;
  tokensPerSecond: number | null;
  promptTokens: number;
  cachedTokens: number;
  draftedTokens: number;
  acceptedTokens: number;
  contextShifts: number;
}

export interface Failure {
  title: string;
  message: string;
  // The body's field that the server refused.
  field: string | null;
  // Of a prompt that does not fit the context: the share that would.
  fitting?: number;
}

// Its data URL is in the image store.
export interface MessageImage {
  id: string;
  name: string;
  width: number;
  height: number;
}

export interface Message {
  id: string;
  role: 'user' | 'assistant' | 'tool';
  content: string;
  images?: MessageImage[];
  reasoning?: string;
  reasoningSeconds?: number;
  calls?: ToolCall[];
  // Of a tool's result: the call that it answers.
  callId?: string;
  state?: 'streaming' | 'stopped' | 'cut';
  stats?: AnswerStats;
  failure?: Failure;
  // Left out of prompts, for a context that was full.
  dropped?: boolean;
}

// Numbers are texts as typed; an empty one leaves the choice to the server.
export interface ChatSettings {
  model: string;
  system: string;
  temperature: string;
  top_p: string;
  top_k: string;
  min_p: string;
  repetition_penalty: string;
  max_tokens: string;
  seed: string;
  overflow: '' | 'length' | 'shift';
  schema: string;
  tools: string;
}

export interface Conversation {
  id: string;
  title: string;
  // Whether the user gave the title.
  named: boolean;
  updated: number;
  messages: Message[];
  settings: ChatSettings;
}

export interface EngineSequence {
  prompt_tokens: number;
  cached_tokens: number;
  context_tokens: number;
  generated_tokens: number;
  context_shifts: number;
  dropped_tokens: number;
  drafted_tokens: number;
  accepted_tokens: number;
  seconds: number;
}

export interface EngineSlot {
  slot: number;
  state: 'free' | 'other' | 'waiting' | 'prefill' | 'decode';
  sequence: EngineSequence | null;
}

export interface EngineCells {
  range: 'full' | 'window' | 'chunk';
  range_size: number | null;
  layers: number;
  total: number;
  used: number;
  shared: number;
  cached: number;
}

export interface EnginePrefix {
  id: number;
  parent: number | null;
  start: number;
  length: number;
  slots: number[];
}

export interface EngineFinished {
  number: number;
  slot: number | null;
  age_seconds: number;
  sequence: EngineSequence;
}

export interface EngineState {
  context: number;
  counts: {
    running: number;
    waiting: number;
    steps: number;
    prompt_tokens: number;
    cached_tokens: number;
    generated_tokens: number;
    context_shifts: number;
    preemptions: number;
    evicted_tokens: number;
  };
  drafters: { kind: string; drafted_tokens: number; accepted_tokens: number }[];
  cells: EngineCells[];
  slots: EngineSlot[];
  finished: EngineFinished[];
  prefixes: EnginePrefix[];
}

// An entry of /v1/models. One of several models has a `status`, and no other properties until it is loaded.
export interface ServedModel {
  id: string;
  parent?: string;
  input_modalities?: string[];
  meta?: { n_slots?: number };
  status?: { value: 'unloaded' | 'loading' | 'loaded' | 'failed'; progress?: string; reason?: string };
}

export interface Capabilities {
  id: string;
  context: number;
  chat: boolean;
  tools: boolean;
  reasoning: boolean;
  drafters: string[];
}
