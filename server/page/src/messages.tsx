// The messages of a conversation, in a column that follows the end while an answer streams.
import { Fragment } from 'preact';
import { useEffect, useMemo, useRef, useState } from 'preact/hooks';
import { MessageView, type MessageActions } from './message';
import { hasOlder } from './prompt';
import type { Server } from './server';
import { KeyField } from './settings';
import { starters, type Starter } from './starters';
import type { Conversation } from './types';

interface MessagesProps {
  conversation: Conversation;
  busy: boolean;
  actions: MessageActions;
  server: Server;
  onKey(): void;
  onStarter(starter: Starter): void;
}

export function Messages({ conversation, busy, actions, server, onKey, onStarter }: MessagesProps) {
  const area = useRef<HTMLDivElement>(null);
  const pinned = useRef(true);
  const [below, setBelow] = useState(false);
  const { messages } = conversation;
  const results = useMemo(() => {
    const found = new Map<string, string>();
    for (const message of messages) if (message.callId) found.set(message.callId, message.content);
    return found;
  }, [messages]);
  const scroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = area.current!;
    pinned.current = scrollHeight - scrollTop - clientHeight < 60;
    setBelow(!pinned.current);
  };
  useEffect(() => {
    if (pinned.current) area.current!.scrollTop = area.current!.scrollHeight;
  }, [messages]);
  useEffect(() => {
    pinned.current = true;
    area.current!.scrollTop = area.current!.scrollHeight;
  }, [conversation.id, messages.length]);
  useEffect(() => {
    // The composer takes height for lines and images.
    const resized = new ResizeObserver(() => {
      if (pinned.current) area.current!.scrollTop = area.current!.scrollHeight;
    });
    resized.observe(area.current!);
    return () => resized.disconnect();
  }, []);
  const last = messages.at(-1);
  const firstSent = messages.find((message) => !message.dropped);
  return (
    <div class="messages" ref={area} onScroll={scroll} tabIndex={0} role="region" aria-label="Messages">
      <div class="column">
        {server.state === 'locked' && (
          <div class="welcome">
            <p>This server needs an API key.</p>
            <KeyField onKey={onKey} />
          </div>
        )}
        {!messages.length && server.state !== 'locked' && <Welcome server={server} onStarter={onStarter} />}
        {messages
          .filter((message) => message.role !== 'tool')
          .map((message) => (
            <Fragment key={message.id}>
              {message === firstSent && message !== messages[0] && (
                <p class="divider hint">The messages above are no longer sent.</p>
              )}
              <MessageView
                message={message}
                pending={server.loading || 'Waiting for the first token'}
                older={message === last && !!message.failure && hasOlder(messages.slice(0, -1))}
                results={results}
                busy={busy}
                last={message === last}
                actions={actions}
              />
            </Fragment>
          ))}
      </div>
      {below && (
        <button type="button" class="to-end" onClick={() => (area.current!.scrollTop = area.current!.scrollHeight)}>
          Latest
        </button>
      )}
    </div>
  );
}

// Of the bundled model, which is trained on texts about Cellar.
const QUESTIONS: Starter[] = ['What is Cellar?', 'What is a slot?'].map((text) => ({ label: text, text }));

function Welcome({ server, onStarter }: { server: Server; onStarter: (starter: Starter) => void }) {
  const { model } = server;
  return (
    <div class="welcome">
      <p class="lead">{model ? model.id : 'Cellar'}</p>
      <p>Conversations stay in this browser. The engine shows what each of them shares, shifts and drafts.</p>
      {model && (
        <ul class="examples">
          {[...(model.id === 'cellar-tiny' ? QUESTIONS : []), ...starters(model)].map((starter) => (
            <li key={starter.label}>
              <button type="button" title={starter.text} onClick={() => onStarter(starter)}>
                {starter.label}
              </button>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}
