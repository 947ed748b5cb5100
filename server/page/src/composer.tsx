// The message field with its buttons: Enter sends, Shift and Enter breaks the line, Escape stops the answer. Images are
// chosen, photographed, pasted or dropped on the page.
import { useEffect, useRef, useState } from 'preact/hooks';
import { Thumbnails } from './attachments';
import { keepImage } from './image_store';
import { MAX_IMAGES, imageFiles, readImage } from './images';
import type { MessageImage } from './types';

export interface Draft {
  text: string;
  images: MessageImage[];
}

// Unsent messages by conversation; new conversations share one.
const drafts = new Map<string, Draft>();
export const NEW = 'new';
const EMPTY: Draft = { text: '', images: [] };

// What the message field of a conversation that is shown next begins with.
export function setDraft(name: string, draft: Draft): void {
  drafts.set(name, draft);
}

interface Props {
  draft: string;
  answering: boolean;
  disabled: boolean;
  // Why the model gets no images; empty if it reads them.
  noImages: string;
  // Images in the messages before this one.
  sentImages: number;
  onSend: (draft: Draft) => void;
  onStop: () => void;
}

export function Composer({ draft: name, answering, disabled, noImages, sentImages, onSend, onStop }: Props) {
  const [draft, setShown] = useState(() => drafts.get(name) ?? EMPTY);
  const [problem, setProblem] = useState('');
  const { text, images } = draft;
  const write = (change: Partial<Draft>) => {
    const changed = { ...(drafts.get(name) ?? EMPTY), ...change };
    drafts.set(name, changed);
    setShown(changed);
  };
  const add = async (files: File[]) => {
    if (!files.length) return;
    setProblem(noImages);
    if (noImages) return;
    for (const file of files) {
      const before = drafts.get(name)?.images ?? [];
      if (sentImages + before.length >= MAX_IMAGES) {
        setProblem(`A conversation has at most ${MAX_IMAGES} images.`);
        return;
      }
      try {
        const { image, url } = await readImage(file);
        if (!(await keepImage(image.id, url))) setProblem('This browser keeps the image only until the tab is closed.');
        write({ images: [...(drafts.get(name)?.images ?? []), image] });
      } catch (error) {
        setProblem((error as Error).message);
      }
    }
    field.current?.focus({ preventScroll: true });
  };
  const field = useRef<HTMLTextAreaElement>(null);
  const dropping = useDrop(add);
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
  const unread = images.length > 0 && noImages;
  const sendable = !disabled && !unread && (!!text.trim() || images.length > 0);
  const submit = () => {
    if (answering || !sendable) return;
    onSend({ text: text.trim(), images });
    write(EMPTY);
    setProblem('');
  };
  const keyDown = (event: KeyboardEvent) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  };
  // Office programs copy a picture of the text along with it.
  const paste = (event: ClipboardEvent) => {
    const files = imageFiles(event.clipboardData);
    if (!files.length || event.clipboardData!.getData('text/plain')) return;
    event.preventDefault();
    void add(files);
  };
  const hint = unread ? `${noImages} Remove the images, or choose another model.` : problem;
  return (
    <form
      class={dropping ? 'composer dropping' : 'composer'}
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      {hint && (
        <p class="column hint" role="alert">
          {hint}
        </p>
      )}
      {images.length > 0 && (
        <div class="column">
          <Thumbnails
            images={images}
            label="Images of this message"
            onRemove={(id) => {
              write({ images: images.filter((image) => image.id !== id) });
              setProblem('');
              field.current?.focus();
            }}
          />
        </div>
      )}
      <div class="column">
        {!noImages && <ImageButtons onFiles={(files) => void add(files)} />}
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
          onInput={(event) => write({ text: event.currentTarget.value })}
          onKeyDown={keyDown}
          onPaste={paste}
        />
        {/* Keys: one element for both would submit the form when a click on Stop ends. */}
        {answering ? (
          <button key="stop" type="button" class="stop" onClick={onStop}>
            Stop
          </button>
        ) : (
          <button key="send" type="submit" class="primary" disabled={!sendable}>
            Send
          </button>
        )}
      </div>
    </form>
  );
}

// Whether files are dragged over the page; a drop passes its images on, instead of leaving the page for them.
function useDrop(add: (files: File[]) => Promise<void>): boolean {
  const [dropping, setDropping] = useState(false);
  const latest = useRef(add);
  latest.current = add;
  useEffect(() => {
    const hasFiles = (event: DragEvent) => !!event.dataTransfer?.types.includes('Files');
    const over = (event: DragEvent) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setDropping(true);
    };
    // Without a related target the pointer leaves the window, not one of its elements.
    const leave = (event: DragEvent) => !event.relatedTarget && setDropping(false);
    const drop = (event: DragEvent) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setDropping(false);
      void latest.current(imageFiles(event.dataTransfer));
    };
    addEventListener('dragover', over);
    addEventListener('dragleave', leave);
    addEventListener('drop', drop);
    return () => {
      removeEventListener('dragover', over);
      removeEventListener('dragleave', leave);
      removeEventListener('drop', drop);
    };
  }, []);
  return dropping;
}

// Files of the device and, on phones, a photo: some of their file choosers offer no camera.
function ImageButtons({ onFiles }: { onFiles: (files: File[]) => void }) {
  const files = useRef<HTMLInputElement>(null);
  const camera = useRef<HTMLInputElement>(null);
  const changed = (event: { currentTarget: HTMLInputElement }) => {
    onFiles([...(event.currentTarget.files ?? [])]);
    event.currentTarget.value = '';
  };
  return (
    <>
      <button type="button" class="icon" aria-label="Attach images" title="Attach images" onClick={() => files.current?.click()}>
        <Icon path="M2.5 3.5h11v9h-11zM2.5 11l3.2-3.2 2.6 2.6 1.6-1.6 3.6 3.4M10.6 6.3h.01" />
      </button>
      <button
        type="button"
        class="icon camera"
        aria-label="Take a photo"
        title="Take a photo"
        onClick={() => camera.current?.click()}
      >
        <Icon path="M1.5 5h3l1.2-1.8h4.6L11.5 5h3v8h-13zM8 6.4a2.4 2.4 0 1 1 0 4.8 2.4 2.4 0 0 1 0-4.8z" />
      </button>
      <input ref={files} type="file" accept="image/*" multiple hidden aria-label="Image files" onChange={changed} />
      <input
        ref={camera}
        type="file"
        accept="image/*"
        capture="environment"
        hidden
        aria-label="Photo"
        onChange={changed}
      />
    </>
  );
}

function Icon({ path }: { path: string }) {
  return (
    <svg viewBox="0 0 16 16" width="20" height="20" aria-hidden="true">
      <path d={path} fill="none" stroke="currentColor" stroke-width="1.3" stroke-linecap="round" stroke-linejoin="round" />
    </svg>
  );
}
