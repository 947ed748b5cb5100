// The view for models without a chat template: one text that the model continues.
import { useEffect, useRef, useState } from 'preact/hooks';
import { completionBody, failureOf, streamCompletion } from './api';
import { remember } from './store';
import type { ChatSettings, Failure } from './types';

const KEY = 'cellar.completion';
// Updates of the page while a text streams.
const UPDATE_MS = 50;

interface Props {
  settings: ChatSettings;
  onFailure(): void;
}

export function Completion({ settings, onFailure }: Props) {
  const [text, setText] = useState(() => localStorage.getItem(KEY) ?? '');
  const [running, setRunning] = useState<AbortController | null>(null);
  const [failure, setFailure] = useState<Failure | null>(null);
  const [status, setStatus] = useState('');
  const field = useRef<HTMLTextAreaElement>(null);
  const write = (changed: string) => {
    setText(changed);
    remember(KEY, changed);
  };
  useEffect(() => {
    if (running) field.current!.scrollTop = field.current!.scrollHeight;
  }, [text, running]);
  useEffect(() => {
    if (!running) {
      field.current!.focus({ preventScroll: true });
      return;
    }
    const escape = (event: KeyboardEvent) => event.key === 'Escape' && running.abort();
    addEventListener('keydown', escape);
    return () => {
      removeEventListener('keydown', escape);
      running.abort();
    };
  }, [running]);
  const proceed = async () => {
    if (running || !text) return;
    const control = new AbortController();
    setRunning(control);
    setFailure(null);
    setStatus('Continuing');
    let whole = text;
    let timer: ReturnType<typeof setTimeout> | undefined;
    try {
      for await (const chunk of streamCompletion(completionBody(text, settings), control.signal)) {
        whole += chunk.choices[0]?.text ?? '';
        timer ??= setTimeout(() => {
          timer = undefined;
          write(whole);
        }, UPDATE_MS);
      }
      setStatus('The text is complete');
    } catch (error) {
      setStatus('Stopped');
      if (!control.signal.aborted) {
        setFailure(failureOf(error));
        onFailure();
      }
    }
    clearTimeout(timer);
    write(whole);
    setRunning(null);
  };
  return (
    <form
      class="completion column"
      onSubmit={(event) => {
        event.preventDefault();
        void proceed();
      }}
    >
      <p class="hint" id="completion-help">
        This model has no chat template: it continues a text. Ctrl and Enter continue, Escape stops.
      </p>
      <label class="visually-hidden" for="composer">
        Text
      </label>
      <textarea
        id="composer"
        ref={field}
        dir="auto"
        aria-describedby="completion-help"
        placeholder="Once upon a time"
        readOnly={!!running}
        aria-busy={!!running}
        value={text}
        onInput={(event) => write(event.currentTarget.value)}
        onKeyDown={(event) => event.key === 'Enter' && (event.ctrlKey || event.metaKey) && void proceed()}
      />
      {failure && (
        <div class="failure" role="alert">
          <strong>{failure.title}</strong>
          <p>{failure.message}</p>
        </div>
      )}
      <div class="actions">
        {/* Keys: one element for both would submit the form when a click on Stop ends. */}
        {running ? (
          <button key="stop" type="button" class="stop" onClick={() => running.abort()}>
            Stop
          </button>
        ) : (
          <button key="continue" type="submit" class="primary" disabled={!text}>
            Continue
          </button>
        )}
      </div>
      <p class="visually-hidden" role="status">
        {status}
      </p>
    </form>
  );
}
