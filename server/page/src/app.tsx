// The page: conversations, the chat, and a panel with the live view of the engine or the settings.
import { useCallback, useEffect, useMemo, useRef, useState } from 'preact/hooks';
import { apiKey, readEngine } from './api';
import { Answering } from './chat';
import { Completion } from './completion';
import { Composer, NEW, setDraft, type Draft } from './composer';
import { EngineView } from './engine';
import { deleteImages, deleteUnusedImages } from './image_store';
import type { MessageActions } from './message';
import { Messages } from './messages';
import { ModelPicker } from './model_picker';
import { usePolling } from './poll';
import { dropOlder, promptMessages } from './prompt';
import { useServer, whyNoImages, type Server } from './server';
import { SettingsPanel } from './settings';
import { Sidebar } from './sidebar';
import { withoutStarter } from './starters';
import {
  deleteConversation,
  imagesOf,
  loadConversations,
  newConversation,
  newId,
  remember,
  saveConversation,
  titleOf,
} from './store';
import type { ChatSettings, Conversation, Message } from './types';

type Panel = 'engine' | 'settings';
type Theme = 'system' | 'light' | 'dark';
const THEMES: Theme[] = ['system', 'light', 'dark'];
const WIDE = '(min-width: 75rem)';

const PANEL = 'cellar.panel';

// What stood beside the chat last time; on narrow windows a panel would cover it.
function rememberedPanel(): Panel | null {
  const found = (['engine', 'settings'] as const).find((name) => name === localStorage.getItem(PANEL));
  return found && matchMedia(WIDE).matches ? found : null;
}

export function App() {
  const [conversations, setConversations] = useState<Conversation[]>(loadConversations);
  const [current, setCurrent] = useState<Conversation>(() => conversations[0] ?? newConversation());
  const [answering, setAnswering] = useState<Answering | null>(null);
  const [panel, setPanel] = useState<Panel | null>(rememberedPanel);
  const [drawer, setDrawer] = useState(false);
  const [status, setStatus] = useState('');
  const [notice, setNotice] = useState('');
  const [attempt, setAttempt] = useState(0);
  const [replaced, setReplaced] = useState<Conversation | null>(null);
  const busy = answering !== null;
  const server = useServer(attempt, current.settings.model, busy);
  const serverRef = useRef(server);
  serverRef.current = server;
  // Without a chat template, texts are completed; conversations stay in the storage.
  const completing = server.model?.chat === false;
  const latest = useRef(current);
  latest.current = current;
  const busyRef = useRef(busy);
  busyRef.current = busy;

  const engine = usePolling(
    panel === 'engine' && server.state !== 'locked' && isLoaded(server),
    `${attempt} ${busy} ${current.id} ${server.chosen?.id}`,
    async (signal) => {
      const value = await readEngine(server.several ? server.chosen!.id : '', signal);
      return { value, busy: value.counts.running > 0 || value.counts.waiting > 0 || busyRef.current };
    },
  );

  // The conversation that is being answered: the list has its state of the last complete message.
  const live = useRef<Conversation | null>(null);
  const show = useCallback((conversation: Conversation) => {
    if (live.current?.id === conversation.id) live.current = conversation;
    setCurrent((now) => (now.id === conversation.id ? conversation : now));
  }, []);
  const keep = useCallback((conversation: Conversation) => {
    show(conversation);
    setConversations((all) =>
      [conversation, ...all.filter((one) => one.id !== conversation.id)].sort(
        (one, other) => other.updated - one.updated,
      ),
    );
    if (!saveConversation(conversation))
      setNotice('The storage of this browser is full: export conversations, then delete some.');
  }, []);

  const ask = useCallback(
    (conversation: Conversation, history: Message[]) => {
      const answer: Message = { id: newId(), role: 'assistant', content: '', state: 'streaming' };
      const shortened = !conversation.messages.every((message) => history.includes(message));
      setReplaced(shortened ? conversation : null);
      const asked: Conversation = { ...conversation, messages: [...history, answer], updated: Date.now() };
      let last = answer;
      live.current = asked;
      keep(asked);
      setStatus('Answering');
      const job = new Answering(conversation.id, answer, (message, final) => {
        last = message;
        const before = live.current ?? asked;
        const now = { ...before, messages: before.messages.map((one) => (one.id === message.id ? message : one)) };
        if (final) keep(now);
        else show(now);
      });
      setAnswering(job);
      // A tab that is reloaded, closed or frozen keeps the text so far.
      const keepText = () => live.current && saveConversation(live.current);
      const leave = () => {
        job.stop();
        keepText();
      };
      addEventListener('pagehide', leave);
      document.addEventListener('visibilitychange', keepText);
      const settings = requestSettings(serverRef.current, asked.settings);
      void job.run(settings, history, !whyNoImages(serverRef.current)).finally(() => {
        removeEventListener('pagehide', leave);
        document.removeEventListener('visibilitychange', keepText);
        live.current = null;
        setAnswering(null);
        setStatus(
          last.failure
            ? `Failed: ${last.failure.message}`
            : last.state === 'stopped' || last.state === 'streaming'
              ? 'Stopped'
              : 'The answer is complete',
        );
        if (last.failure) setAttempt((count) => count + 1);
      });
    },
    [keep, show],
  );

  const send = (draft: Draft, settings = current.settings) =>
    ask({ ...current, settings }, [...current.messages, userMessage(draft)]);
  const actions: MessageActions = useMemo(
    () => ({
      edit(id, text) {
        const at = latest.current.messages.findIndex((message) => message.id === id);
        const images = latest.current.messages[at]?.images ?? [];
        ask(latest.current, [...latest.current.messages.slice(0, at), userMessage({ text, images })]);
      },
      regenerate(id) {
        const at = latest.current.messages.findIndex((message) => message.id === id);
        ask(latest.current, latest.current.messages.slice(0, at));
      },
      answerCalls(id, results) {
        const at = latest.current.messages.findIndex((message) => message.id === id);
        const calls = latest.current.messages[at]?.calls ?? [];
        const answers = calls.map((call, place): Message => ({
          id: newId(),
          role: 'tool',
          content: results[place] ?? '',
          callId: call.id,
        }));
        ask(latest.current, [...latest.current.messages.slice(0, at + 1), ...answers]);
      },
      dropOlder(id) {
        const at = latest.current.messages.findIndex((message) => message.id === id);
        const fitting = latest.current.messages[at]?.failure?.fitting ?? 1;
        ask(latest.current, dropOlder(latest.current.messages.slice(0, at), fitting));
      },
      startAnew(id) {
        const at = latest.current.messages.findIndex((message) => message.id === id);
        const question = latest.current.messages
          .slice(0, at)
          .filter((message) => message.role === 'user')
          .at(-1);
        setDraft(NEW, { text: question?.content ?? '', images: question?.images ?? [] });
        setCurrent(newConversation(withoutStarter(latest.current.settings)));
      },
      restore:
        replaced?.id === current.id
          ? () => {
              keep({ ...latest.current, messages: replaced.messages });
              setReplaced(latest.current);
            }
          : null,
    }),
    [ask, keep, replaced, current.id],
  );

  useEffect(() => {
    const locked = () => setAttempt((count) => count + 1);
    addEventListener('cellar-key', locked);
    return () => removeEventListener('cellar-key', locked);
  }, []);
  useEffect(() => {
    document.title = current.messages.length && !completing ? `${titleOf(current)} – Cellar` : 'Cellar';
  }, [current, completing]);
  // Escape closes what lies over the chat on narrow screens; while an answer streams it stops the answer.
  useEffect(() => {
    const close = (event: KeyboardEvent) => {
      if (event.key !== 'Escape' || event.defaultPrevented || busyRef.current) return;
      setDrawer(false);
      if (!matchMedia(WIDE).matches) setPanel(null);
    };
    addEventListener('keydown', close);
    return () => removeEventListener('keydown', close);
  }, []);
  useEffect(() => {
    if (drawer) document.querySelector<HTMLElement>('.sidebar .new')?.focus();
  }, [drawer]);
  useEffect(() => {
    if (matchMedia(WIDE).matches) remember(PANEL, panel ?? '');
    else if (panel) document.querySelector<HTMLElement>('.panel .icon')?.focus();
  }, [panel]);
  // Conversations of other tabs.
  useEffect(() => {
    const changed = () => {
      const loaded = loadConversations();
      setConversations(loaded);
      if (busyRef.current) return;
      setCurrent((now) => loaded.find((one) => one.id === now.id && one.updated > now.updated) ?? now);
    };
    addEventListener('storage', changed);
    return () => removeEventListener('storage', changed);
  }, []);

  useEffect(() => void deleteUnusedImages(new Set(imagesOf(loadConversations()).map((image) => image.id))), []);

  const sentImages = promptMessages(current.messages).flatMap((message) => message.images ?? []).length;
  const closePanel = () => {
    document.querySelector<HTMLElement>(`[data-panel='${panel}']`)?.focus();
    setPanel(null);
  };
  const select = (conversation: Conversation) =>
    setCurrent(live.current?.id === conversation.id ? live.current : conversation);
  const open = (conversation: Conversation) => {
    select(conversation);
    setDrawer(false);
  };
  const remove = (id: string) => {
    if (answering?.conversation === id) {
      answering.discard();
      live.current = null;
    }
    deleteConversation(id);
    void deleteImages(imagesOf(conversations.filter((one) => one.id === id)).map((image) => image.id));
    const rest = conversations.filter((one) => one.id !== id);
    setConversations(rest);
    if (current.id === id) select(rest[0] ?? newConversation(withoutStarter(latest.current.settings)));
  };
  const change = (settings: ChatSettings) => {
    const changed = { ...current, settings };
    setCurrent(changed);
    if (current.messages.length) keep(changed);
  };

  // A long list is not drawn again for each piece of an answer.
  const sidebar = useMemo(
    () => (
      <Sidebar
        open={drawer}
        conversations={conversations}
        current={current.id}
        onClose={() => {
          setDrawer(false);
          document.querySelector<HTMLElement>('.top .drawer-button')?.focus();
        }}
        onOpen={open}
        onNew={() => open(newConversation(withoutStarter(latest.current.settings)))}
        onRename={(conversation, title) => keep({ ...conversation, title, named: !!title })}
        onDelete={remove}
        onImport={(added) => {
          for (const conversation of added) keep(conversation);
          if (added[0]) open(added[0]);
        }}
        onNotice={setNotice}
      />
    ),
    [drawer, conversations, current.id, answering],
  );
  return (
    <div class={`app${panel ? ' with-panel' : ''}${drawer ? ' with-drawer' : ''}${completing ? ' alone' : ''}`}>
      <a class="skip" href="#composer">
        Skip to the message field
      </a>
      {!completing && sidebar}
      <main>
        <header class="top">
          {!completing && (
            <button
              type="button"
              class="icon drawer-button"
              aria-label="Conversations"
              aria-expanded={drawer}
              onClick={() => setDrawer(!drawer)}
            >
              <Lines />
            </button>
          )}
          <div class="heading">
            <h1>{completing ? 'Completion' : titleOf(current)}</h1>
            <p class={`server ${server.state}`}>
              <i aria-hidden="true" />
              <ModelPicker server={server} onChange={(model) => change({ ...current.settings, model })} />
            </p>
          </div>
          <nav aria-label="Panels">
            {(['engine', 'settings'] as const).map((name) => (
              <button
                key={name}
                type="button"
                data-panel={name}
                aria-pressed={panel === name}
                onClick={() => setPanel(panel === name ? null : name)}
              >
                {name === 'engine' ? 'Engine' : 'Settings'}
              </button>
            ))}
            <ThemeButton />
          </nav>
        </header>
        {notice && (
          <p class="notice" role="alert">
            {notice}
            <button type="button" class="quiet" onClick={() => setNotice('')}>
              Dismiss
            </button>
          </p>
        )}
        {completing ? (
          <Completion settings={requestSettings(server, current.settings)} onFailure={() => setAttempt((count) => count + 1)} />
        ) : (
          <>
            <Messages
              conversation={current}
              busy={busy}
              actions={actions}
              server={server}
              onKey={() => setAttempt((count) => count + 1)}
              onStarter={({ text, settings }) => send({ text, images: [] }, { ...current.settings, ...settings })}
            />
            {sentImages > 0 && server.chosen?.input_modalities && whyNoImages(server) && (
              <p class="column hint">{whyNoImages(server)} It does not get those of this conversation.</p>
            )}
            <Composer
              key={current.id}
              draft={current.messages.length ? current.id : NEW}
              answering={answering?.conversation === current.id}
              disabled={busy && answering.conversation !== current.id}
              noImages={whyNoImages(server)}
              sentImages={sentImages}
              onSend={(draft) => send(draft)}
              onStop={() => answering?.stop()}
            />
            <p class="visually-hidden" role="status">
              {status}
            </p>
          </>
        )}
      </main>
      {panel && (
        <aside class="panel" aria-label={panel === 'engine' ? 'Engine' : 'Settings'}>
          <header>
            <h2>{panel === 'engine' ? 'Engine' : 'Settings'}</h2>
            <button type="button" class="icon" aria-label="Close the panel" onClick={closePanel}>
              ×
            </button>
          </header>
          <div
            class="scroll"
            tabIndex={0}
            role="region"
            aria-label={panel === 'engine' ? 'Live view of the engine' : 'Settings of the conversation'}
          >
            {panel === 'engine' ? (
              <EngineView state={engine.value} failed={engine.failed} />
            ) : (
              <SettingsPanel
                settings={current.settings}
                model={server.model}
                keyNeeded={server.state === 'locked' || !!apiKey()}
                onChange={change}
                onKey={() => setAttempt((count) => count + 1)}
              />
            )}
          </div>
        </aside>
      )}
    </div>
  );
}

function userMessage({ text, images }: Draft): Message {
  const message: Message = { id: newId(), role: 'user', content: text };
  return images.length ? { ...message, images } : message;
}

// With the name of the model that the server has, where it has several names.
function requestSettings({ models, chosen }: Server, settings: ChatSettings): ChatSettings {
  return { ...settings, model: chosen && models.length > 1 ? chosen.id : '' };
}

function isLoaded({ several, chosen }: Server): boolean {
  return !several || chosen?.status?.value === 'loaded';
}

function ThemeButton() {
  const [theme, setTheme] = useState<Theme>(
    () => THEMES.find((each) => each === localStorage.getItem('cellar.theme')) ?? 'system',
  );
  useEffect(() => {
    document.documentElement.dataset['theme'] = theme;
    remember('cellar.theme', theme);
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!;
  return (
    <button
      type="button"
      class="icon"
      aria-label={`Colours: ${theme}. Switch to ${next}`}
      title={`Colours: ${theme}`}
      onClick={() => setTheme(next)}
    >
      {{ system: '◐', light: '○', dark: '●' }[theme]}
    </button>
  );
}

function Lines() {
  return (
    <svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">
      <path d="M2 4h12M2 8h12M2 12h12" fill="none" stroke="currentColor" stroke-width="1.5" stroke-linecap="round" />
    </svg>
  );
}
