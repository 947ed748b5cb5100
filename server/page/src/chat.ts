// One conversation with the server: requests, streamed deltas, stopping.
import { ApiFailure, failureOf, requestBody, streamChat, type Chunk } from './api';
import { imageUrl } from './image_store';
import { promptMessages } from './prompt';
import { newId } from './store';
import type { AnswerStats, ChatSettings, Message } from './types';

// Updates of the page while an answer streams: one a frame would spend more time on rendering than on text.
const UPDATE_MS = 50;

async function imageUrls(messages: Message[]): Promise<Map<string, string>> {
  const urls = new Map<string, string>();
  for (const { id } of promptMessages(messages).flatMap((message) => message.images ?? [])) {
    const url = await imageUrl(id);
    if (url) urls.set(id, url);
  }
  return urls;
}

export class Answering {
  private readonly control = new AbortController();
  private readonly started = performance.now();
  private firstText: number | null = null;
  private reasoningEnd: number | null = null;
  private cut = false;

  constructor(
    readonly conversation: string,
    private message: Message,
    private publish: (message: Message, final: boolean) => void,
  ) {}

  stop(): void {
    this.control.abort();
  }

  // Stop, and publish nothing more.
  discard(): void {
    this.publish = () => undefined;
    this.control.abort();
  }

  // With the images of the messages if the model reads them.
  async run(settings: ChatSettings, history: Message[], readsImages: boolean): Promise<void> {
    let timer: ReturnType<typeof setTimeout> | undefined;
    try {
      const urls = readsImages ? await imageUrls(history) : new Map<string, string>();
      for await (const chunk of streamChat(requestBody(history, settings, urls), this.control.signal)) {
        this.add(chunk);
        timer ??= setTimeout(() => {
          timer = undefined;
          this.publish(this.message, false);
        }, UPDATE_MS);
      }
      this.end(this.cut ? { state: 'cut' } : {});
    } catch (error) {
      this.end(this.control.signal.aborted ? { state: 'stopped' } : { failure: failureOf(error) }, error);
    } finally {
      clearTimeout(timer);
    }
  }

  private end(change: Partial<Message>, error?: unknown): void {
    const { state: _, ...message } = this.message;
    if (error instanceof ApiFailure && error.status === 401) dispatchEvent(new Event('cellar-key'));
    if (message.reasoning) message.reasoningSeconds = ((this.reasoningEnd ?? performance.now()) - this.started) / 1000;
    if (!message.stats && this.firstText !== null) message.stats = this.measured();
    this.message = { ...message, ...change };
    this.publish(this.message, true);
  }

  // The figures of a stopped answer, for which the server sends none.
  private measured(): AnswerStats {
    const none = {
      tokens: 0,
      tokensPerSecond: null,
      promptTokens: 0,
      cachedTokens: 0,
      draftedTokens: 0,
      acceptedTokens: 0,
      contextShifts: 0,
    };
    return { firstToken: this.firstText, ...none };
  }

  private add(chunk: Chunk): void {
    const choice = chunk.choices[0];
    const message: Message = { ...this.message };
    if (choice) {
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
      if (content || reasoning || calls) this.firstText ??= performance.now() - this.started;
      if (reasoning) message.reasoning = (message.reasoning ?? '') + reasoning;
      if (content) {
        if (message.reasoning) this.reasoningEnd ??= performance.now();
        message.content += content;
      }
      for (const call of calls ?? []) {
        const list = [...(message.calls ?? [])];
        const before = list[call.index] ?? { id: call.id ?? newId(), name: '', arguments: '' };
        list[call.index] = {
          ...before,
          name: before.name + (call.function?.name ?? ''),
          arguments: before.arguments + (call.function?.arguments ?? ''),
        };
        message.calls = list;
      }
      if (choice.finish_reason === 'length') this.cut = true;
    }
    if (chunk.usage) message.stats = this.reported(chunk);
    this.message = message;
  }

  private reported(chunk: Chunk): AnswerStats {
    const { usage, timings } = chunk;
    return {
      firstToken: this.firstText,
      tokens: usage!.completion_tokens,
      tokensPerSecond: timings?.predicted_per_second ?? null,
      promptTokens: usage!.prompt_tokens,
      cachedTokens: usage!.prompt_tokens_details?.cached_tokens ?? 0,
      draftedTokens: timings?.draft_n ?? 0,
      acceptedTokens: timings?.draft_n_accepted ?? 0,
      contextShifts: usage!.context_shifts ?? 0,
    };
  }
}
