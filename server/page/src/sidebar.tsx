// The list of conversations: new, open, rename, delete, export, import.
import { useRef, useState } from 'preact/hooks';
import { exported, imported, titleOf } from './store';
import type { Conversation } from './types';

interface Props {
  open: boolean;
  conversations: Conversation[];
  current: string;
  onClose(): void;
  onOpen(conversation: Conversation): void;
  onNew(): void;
  onRename(conversation: Conversation, title: string): void;
  onDelete(id: string): void;
  onImport(conversations: Conversation[]): void;
  onNotice(text: string): void;
}

const LICENCES = document.querySelector<HTMLMetaElement>('meta[name="licences"]')?.content ?? '';

async function download(name: string, conversations: Conversation[]): Promise<void> {
  const url = URL.createObjectURL(new Blob([await exported(conversations)], { type: 'application/json' }));
  const link = document.createElement('a');
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function focus(input: HTMLInputElement | null): void {
  if (input && document.activeElement !== input) input.focus();
}

export function Sidebar(props: Props) {
  const { open, conversations, current, onClose, onNew, onImport, onNotice } = props;
  const file = useRef<HTMLInputElement>(null);
  const load = async (event: { currentTarget: HTMLInputElement }) => {
    const input = event.currentTarget;
    const chosen = input.files?.[0];
    if (!chosen) return;
    try {
      onImport(await imported(await chosen.text()));
    } catch (error) {
      onNotice((error as Error).message);
    }
    input.value = '';
  };
  return (
    <aside class="sidebar" aria-label="Conversations" data-open={open}>
      <header>
        <span class="brand">Cellar</span>
        <button type="button" class="icon drawer-button" aria-label="Close the list" onClick={onClose}>
          ×
        </button>
      </header>
      <button type="button" class="new" onClick={onNew}>
        New conversation
      </button>
      <ul class="scroll" tabIndex={0} aria-label="Conversations">
        {conversations.map((conversation) => (
          <Entry key={conversation.id} conversation={conversation} active={conversation.id === current} {...props} />
        ))}
      </ul>
      <footer>
        <button
          type="button"
          class="quiet"
          disabled={!conversations.length}
          onClick={() => void download('cellar-conversations.json', conversations)}
        >
          Export all
        </button>
        <button type="button" class="quiet" onClick={() => file.current?.click()}>
          Import
        </button>
        <a class="quiet" href={LICENCES} target="_blank" rel="noopener">
          Licences
        </a>
        <input
          ref={file}
          type="file"
          accept="application/json,.json"
          hidden
          aria-label="File of conversations"
          onChange={(event) => void load(event)}
        />
      </footer>
    </aside>
  );
}

function Entry({
  conversation,
  active,
  onOpen,
  onRename,
  onDelete,
}: Props & { conversation: Conversation; active: boolean }) {
  const [draft, setDraft] = useState<string | null>(null);
  const [asking, setAsking] = useState(false);
  const title = titleOf(conversation);
  if (draft !== null) {
    const save = () => {
      onRename(conversation, draft.trim());
      setDraft(null);
    };
    return (
      <li class="entry">
        <form
          onSubmit={(event) => {
            event.preventDefault();
            save();
          }}
        >
          <input
            aria-label="Title"
            value={draft}
            ref={focus}
            onInput={(event) => setDraft(event.currentTarget.value)}
            onKeyDown={(event) => event.key === 'Escape' && setDraft(null)}
            onBlur={save}
          />
        </form>
      </li>
    );
  }
  return (
    <li class={active ? 'entry active' : 'entry'}>
      <button
        type="button"
        class="title"
        aria-current={active ? 'true' : undefined}
        onClick={() => onOpen(conversation)}
      >
        {title}
      </button>
      <div class="actions">
        {asking ? (
          <>
            <button type="button" class="quiet bad" onClick={() => onDelete(conversation.id)}>
              Delete
            </button>
            <button type="button" class="quiet" onClick={() => setAsking(false)}>
              Keep
            </button>
          </>
        ) : (
          <>
            <button type="button" class="quiet" aria-label={`Rename ${title}`} onClick={() => setDraft(title)}>
              Rename
            </button>
            <button
              type="button"
              class="quiet"
              aria-label={`Export ${title}`}
              onClick={() => void download('cellar-conversation.json', [conversation])}
            >
              Export
            </button>
            <button type="button" class="quiet" aria-label={`Delete ${title}`} onClick={() => setAsking(true)}>
              Delete
            </button>
          </>
        )}
      </div>
    </li>
  );
}
