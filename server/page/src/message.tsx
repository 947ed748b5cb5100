// One message: text, reasoning, tool calls with their results, figures, errors, and what can be done with it.
import { useLayoutEffect, useRef, useState } from 'preact/hooks';
import { Thumbnails } from './attachments';
import { CopyButton } from './copy';
import { Code, Markdown } from './markdown';
import type { AnswerStats, Message, ToolCall } from './types';

export interface MessageActions {
  edit(id: string, text: string): void;
  regenerate(id: string): void;
  answerCalls(id: string, results: string[]): void;
  // Of a prompt that does not fit: again without older messages, or its text in a new conversation.
  dropOlder(id: string): void;
  startAnew(id: string): void;
  // Puts back the messages that the last edit or regeneration replaced.
  restore: (() => void) | null;
}

interface Props {
  message: Message;
  // Whether turns before this message are sent with it.
  older: boolean;
  // What an answer without text waits for.
  pending: string;
  results: Map<string, string>;
  busy: boolean;
  last: boolean;
  actions: MessageActions;
}

export function MessageView(props: Props) {
  return props.message.role === 'user' ? <UserMessage {...props} /> : <Answer {...props} />;
}

function UserMessage({ message, busy, actions }: Props) {
  const [draft, setDraft] = useState<string | null>(null);
  const editor = useRef<HTMLTextAreaElement>(null);
  const editing = draft !== null;
  const images = message.images ?? [];
  const sendable = !!draft?.trim() || (editing && images.length > 0);
  useLayoutEffect(() => {
    if (editing) editor.current?.focus();
  }, [editing]);
  const save = () => {
    if (sendable) actions.edit(message.id, draft!);
    setDraft(null);
  };
  const keyDown = (event: KeyboardEvent) => {
    if (event.key === 'Escape') setDraft(null);
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      save();
    }
  };
  if (editing) {
    return (
      <article class="message user editing" aria-label="You, editing">
        <textarea
          ref={editor}
          dir="auto"
          aria-label="Edit your message"
          value={draft}
          rows={Math.min(draft.split('\n').length + 1, 12)}
          onInput={(event) => setDraft(event.currentTarget.value)}
          onKeyDown={keyDown}
        />
        <p class="hint">The answers after it are replaced.</p>
        <div class="actions">
          <button type="button" class="primary" onClick={save} disabled={!sendable}>
            Send
          </button>
          <button type="button" onClick={() => setDraft(null)}>
            Cancel
          </button>
        </div>
      </article>
    );
  }
  return (
    <article class="message user" aria-label="You">
      {images.length > 0 && <Thumbnails images={images} label="Images" />}
      {message.content && (
        <div class="bubble" dir="auto">
          {message.content}
        </div>
      )}
      <div class="actions">
        {message.content && <CopyButton text={message.content} />}
        <button type="button" class="quiet" disabled={busy} onClick={() => setDraft(message.content)}>
          Edit
        </button>
      </div>
    </article>
  );
}

function Answer({ message, older, pending, results, busy, last, actions }: Props) {
  const streaming = message.state === 'streaming';
  const calls = message.calls ?? [];
  const open = calls.length > 0 && last && !streaming && !calls.every((call) => results.has(call.id));
  return (
    <article class="message answer" aria-label="Answer" aria-busy={streaming}>
      {message.reasoning && (
        <Reasoning
          text={message.reasoning}
          seconds={message.reasoningSeconds}
          running={streaming && !message.content}
        />
      )}
      {message.content && <Markdown text={message.content} />}
      {streaming && !message.content && !message.reasoning && <p class="pending">{pending}</p>}
      {open ? (
        <OpenCalls message={message} calls={calls} onSend={(texts) => actions.answerCalls(message.id, texts)} />
      ) : (
        calls.map((call) => <CallCard key={call.id} call={call} result={results.get(call.id)} />)
      )}
      {message.failure && (
        <div class="failure" role="alert">
          <strong>{message.failure.title}</strong>
          <p>{message.failure.message}</p>
          {message.failure.field && (
            <p>
              Field: <code>{message.failure.field}</code>
            </p>
          )}
          {last && message.failure.fitting !== undefined && (
            <div class="actions">
              {older && (
                <button type="button" disabled={busy} onClick={() => actions.dropOlder(message.id)}>
                  Drop older messages and try again
                </button>
              )}
              <button type="button" disabled={busy} onClick={() => actions.startAnew(message.id)}>
                Start a new conversation
              </button>
            </div>
          )}
        </div>
      )}
      {message.state === 'stopped' && <p class="hint">Stopped</p>}
      {message.state === 'cut' && <p class="hint">Cut at the limit of tokens or of the context</p>}
      {!streaming && (
        <footer>
          {message.stats && <Figures stats={message.stats} />}
          <div class="actions">
            {message.content && <CopyButton text={message.content} />}
            {last && (
              <button type="button" class="quiet" disabled={busy} onClick={() => actions.regenerate(message.id)}>
                {message.failure ? 'Try again' : 'Regenerate'}
              </button>
            )}
            {last && actions.restore && (
              <button type="button" class="quiet" disabled={busy} onClick={actions.restore}>
                Restore what it replaced
              </button>
            )}
          </div>
        </footer>
      )}
    </article>
  );
}

function Reasoning({ text, seconds, running }: { text: string; seconds: number | undefined; running: boolean }) {
  const label = running ? 'Reasoning' : `Reasoning${seconds ? `, ${seconds.toFixed(1)} s` : ''}`;
  return (
    <details class="reasoning">
      <summary class={running ? 'pending' : ''}>{label}</summary>
      <Markdown text={text} />
    </details>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function CallCard({ call, result }: { call: ToolCall; result: string | undefined }) {
  return (
    <section class="call" aria-label={`Call of ${call.name}`}>
      <h3>
        <span class="tag">tool</span> {call.name}
      </h3>
      <Code text={pretty(call.arguments)} language="json" label="arguments" />
      {result !== undefined && <Code text={pretty(result)} language="json" label="result" />}
    </section>
  );
}

function OpenCalls({
  message,
  calls,
  onSend,
}: {
  message: Message;
  calls: ToolCall[];
  onSend: (texts: string[]) => void;
}) {
  const [texts, setTexts] = useState<string[]>(calls.map(() => ''));
  const submit = (event: Event) => {
    event.preventDefault();
    onSend(texts);
  };
  return (
    <form onSubmit={submit}>
      {calls.map((call, at) => (
        <div key={call.id}>
          <CallCard call={call} result={undefined} />
          <label class="field" for={`${message.id}-${at}`}>
            Result of {call.name}
          </label>
          <textarea
            id={`${message.id}-${at}`}
            rows={2}
            spellcheck={false}
            placeholder="What the tool returns, as text or JSON"
            value={texts[at]}
            onInput={(event) => setTexts(texts.map((text, place) => (place === at ? event.currentTarget.value : text)))}
          />
        </div>
      ))}
      <div class="actions">
        <button type="submit" class="primary" disabled={texts.some((text) => !text.trim())}>
          Send {calls.length > 1 ? 'results' : 'result'}
        </button>
      </div>
    </form>
  );
}

function Figures({ stats }: { stats: AnswerStats }) {
  const speed = stats.tokensPerSecond === null ? 'Figures' : `${format(stats.tokensPerSecond)} tok/s`;
  return (
    <details class="more">
      <summary>{speed}</summary>
      <ul class="figures" aria-label="Figures of this answer">
        {stats.firstToken !== null && (
          <li title="Time from the request to the first text">first token {milliseconds(stats.firstToken)}</li>
        )}
        {stats.tokens > 0 && <li title="Tokens of the answer">{stats.tokens.toLocaleString('en')} tokens</li>}
        {stats.promptTokens > 0 && (
          <li title="Prompt tokens found in the prefix cache">
            {stats.cachedTokens.toLocaleString('en')} of {stats.promptTokens.toLocaleString('en')} prompt tokens cached
          </li>
        )}
        {stats.draftedTokens > 0 && (
          <li title="Draft tokens accepted, speculative decoding">
            {stats.acceptedTokens} of {stats.draftedTokens} drafts accepted
          </li>
        )}
        {stats.contextShifts > 0 && (
          <li title="Times that the oldest half of the context was dropped">
            {stats.contextShifts} context {stats.contextShifts === 1 ? 'shift' : 'shifts'}
          </li>
        )}
      </ul>
    </details>
  );
}

export function format(value: number): string {
  return value >= 100 ? Math.round(value).toLocaleString('en') : value.toFixed(1);
}

function milliseconds(value: number): string {
  return value >= 1000 ? `${(value / 1000).toFixed(1)} s` : `${Math.round(value)} ms`;
}
