// The messages of a conversation, in a column that follows the end while an answer streams.
import { Fragment } from 'preact';
import { useEffect, useMemo, useRef, useState } from 'preact/hooks';
import { MessageView, type MessageActions } from './message';
import { hasOlder } from './prompt';
import type { Server } from './server';
import { KeyField } from './settings';
import type { Conversation } from './types';

interface MessagesProps {
  conversation: Conversation;
  busy: boolean;
  actions: MessageActions;
  server: Server;
  onKey(): void;
  onExample(text: string): void;
}

export function Messages({ conversation, busy, actions, server, onKey, onExample }: MessagesProps) {
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
        {!messages.length && server.state !== 'locked' && <Welcome server={server} onExample={onExample} />}
        {messages
          .filter((message) => message.role !== 'tool')
          .map((message) => (
            <Fragment key={message.id}>
              {message === firstSent && message !== messages[0] && (
                <p class="divider hint">The messages above are no longer sent.</p>
              )}
              <MessageView
                message={message}
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

const EXAMPLES = ['What is Cellar?', 'What is a slot?', 'What does --slots do?'];

function Welcome({ server, onExample }: { server: Server; onExample: (text: string) => void }) {
  return (
    <div class="welcome">
      <p class="lead">{server.model ? server.model.id : 'Cellar'}</p>
      <p>Conversations stay in this browser. The engine shows what each of them shares, shifts and drafts.</p>
      {server.model?.id === 'cellar-tiny' && (
        <ul class="examples">
          {EXAMPLES.map((text) => (
            <li key={text}>
              <button type="button" onClick={() => onExample(text)}>
                {text}
              </button>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}
