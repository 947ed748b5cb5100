// The message field with its button: Enter sends, Shift and Enter breaks the line, Escape stops the answer.
import { useEffect, useRef, useState } from 'preact/hooks';

// Unsent texts by conversation; new conversations share one.
const drafts = new Map<string, string>();
export const NEW = 'new';

// What the message field of a conversation that is shown next begins with.
export function setDraft(draft: string, text: string): void {
  drafts.set(draft, text);
}

export function Composer({
  draft,
  answering,
  disabled,
  onSend,
  onStop,
}: {
  draft: string;
  answering: boolean;
  disabled: boolean;
  onSend: (text: string) => void;
  onStop: () => void;
}) {
  const [text, setText] = useState(() => drafts.get(draft) ?? '');
  const write = (changed: string) => {
    drafts.set(draft, changed);
    setText(changed);
  };
  const field = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    field.current?.focus({ preventScroll: true });
  }, []);
  useEffect(() => {
    const area = field.current!;
    area.style.height = 'auto';
    area.style.height = `${area.scrollHeight}px`;
  }, [text]);
  useEffect(() => {
    if (!answering) return;
    const escape = (event: KeyboardEvent) => event.key === 'Escape' && onStop();
    addEventListener('keydown', escape);
    return () => removeEventListener('keydown', escape);
  }, [answering, onStop]);
  const submit = () => {
    if (answering || disabled || !text.trim()) return;
    onSend(text.trim());
    write('');
  };
  const keyDown = (event: KeyboardEvent) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      <div class="column">
        <label class="visually-hidden" for="composer">
          Message
        </label>
        <textarea
          id="composer"
          ref={field}
          dir="auto"
          rows={1}
          value={text}
          placeholder={disabled ? 'Another conversation is being answered' : 'Write a message'}
          onInput={(event) => write(event.currentTarget.value)}
          onKeyDown={keyDown}
        />
        {/* Keys: one element for both would submit the form when a click on Stop ends. */}
        {answering ? (
          <button key="stop" type="button" class="stop" onClick={onStop}>
            Stop
          </button>
        ) : (
          <button key="send" type="submit" class="primary" disabled={disabled || !text.trim()}>
            Send
          </button>
        )}
      </div>
    </form>
  );
}
