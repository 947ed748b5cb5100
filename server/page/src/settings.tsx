// The settings of a conversation: system prompt, sampling, structure and tools; and the API key of the browser's session.
import { useState } from 'preact/hooks';
import { apiKey, setApiKey } from './api';
import type { Capabilities, ChatSettings } from './types';

interface Sampling {
  name: 'temperature' | 'top_p' | 'top_k' | 'min_p' | 'repetition_penalty' | 'max_tokens' | 'seed';
  label: string;
  help: string;
  min: number;
  max?: number;
  step: number | 'any';
}

const SAMPLING: Sampling[] = [
  { name: 'temperature', label: 'Temperature', help: '0: always the likeliest token', min: 0, max: 2, step: 'any' },
  { name: 'top_p', label: 'Top p', help: 'Probability mass to sample from', min: 0, max: 1, step: 'any' },
  { name: 'top_k', label: 'Top k', help: 'Tokens to sample from', min: 0, step: 1 },
  { name: 'min_p', label: 'Min p', help: 'Relative to the likeliest token', min: 0, max: 1, step: 'any' },
  { name: 'repetition_penalty', label: 'Repetition penalty', help: '1: none', min: 0, max: 2, step: 'any' },
  { name: 'max_tokens', label: 'Max tokens', help: 'Of an answer', min: 1, step: 1 },
  { name: 'seed', label: 'Seed', help: 'The same seed, the same text', min: 0, step: 1 },
];

interface Props {
  settings: ChatSettings;
  model: Capabilities | null;
  keyNeeded: boolean;
  onChange(settings: ChatSettings): void;
  onKey(): void;
}

function jsonError(text: string): string {
  if (!text.trim()) return '';
  try {
    JSON.parse(text);
    return '';
  } catch (error) {
    return (error as Error).message;
  }
}

export function SettingsPanel({ settings, model, keyNeeded, onChange, onKey }: Props) {
  const set =
    (name: keyof ChatSettings) =>
    (event: { currentTarget: HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement }) =>
      onChange({ ...settings, [name]: event.currentTarget.value });
  const chats = model?.chat !== false;
  return (
    <div class="settings">
      <p class="hint">Of this conversation, and of new ones. An empty field leaves the choice to the server.</p>
      {keyNeeded && <KeyField onKey={onKey} />}
      {chats && (
        <>
          <label class="field" for="system">
            System prompt
          </label>
          <textarea id="system" rows={3} value={settings.system} onInput={set('system')} />
        </>
      )}
      <fieldset>
        <legend>Sampling</legend>
        <div class="grid">
          {SAMPLING.map(({ name, label, help, min, max, step }) => (
            <div key={name}>
              <label class="field" for={name}>
                {label}
              </label>
              <input
                id={name}
                type="number"
                inputMode="decimal"
                min={min}
                max={max}
                step={step}
                value={settings[name]}
                onInput={set(name)}
                aria-describedby={`${name}-help`}
              />
              <span class="hint" id={`${name}-help`}>
                {help}
              </span>
            </div>
          ))}
          <div>
            <label class="field" for="overflow">
              At a full context
            </label>
            <select id="overflow" value={settings.overflow} onChange={set('overflow')}>
              <option value="">as the server</option>
              <option value="length">end the answer</option>
              <option value="shift">shift and continue</option>
            </select>
            <span class="hint">A shift drops the older half</span>
          </div>
        </div>
      </fieldset>
      {chats && (
        <JsonField
          id="schema"
          label="JSON schema"
          help="The answer is JSON that follows it."
          value={settings.schema}
          onInput={set('schema')}
          placeholder={'{"type": "object", "properties": {"name": {"type": "string"}}}'}
        />
      )}
      {chats && (!model || model.tools) && (
        <JsonField
          id="tools"
          label="Tools"
          help="A JSON list, as in OpenAI's API. Calls are shown as cards; you enter the results."
          value={settings.tools}
          onInput={set('tools')}
          placeholder={'[{"type": "function", "function": {"name": "get_weather", "parameters": {…}}}]'}
        />
      )}
    </div>
  );
}

function JsonField({
  id,
  label,
  help,
  value,
  placeholder,
  onInput,
}: {
  id: string;
  label: string;
  help: string;
  value: string;
  placeholder: string;
  onInput: (event: { currentTarget: HTMLTextAreaElement }) => void;
}) {
  const error = jsonError(value);
  return (
    <>
      <label class="field" for={id}>
        {label}
      </label>
      <textarea
        id={id}
        class="mono"
        rows={value ? 6 : 3}
        spellcheck={false}
        value={value}
        placeholder={placeholder}
        onInput={onInput}
        aria-invalid={!!error}
        aria-describedby={`${id}-help`}
      />
      <span id={`${id}-help`} class={error ? 'hint bad' : 'hint'}>
        {error || help}
      </span>
    </>
  );
}

export function KeyField({ onKey }: { onKey: () => void }) {
  const [key, setKey] = useState(apiKey());
  const submit = (event: Event) => {
    event.preventDefault();
    setApiKey(key.trim());
    onKey();
  };
  return (
    <form class="key" onSubmit={submit}>
      <label class="field" for="key">
        API key
      </label>
      <div class="row">
        <input
          id="key"
          type="password"
          autocomplete="off"
          value={key}
          onInput={(event) => setKey(event.currentTarget.value)}
          aria-describedby="key-help"
        />
        <button type="submit" class="primary">
          Use
        </button>
      </div>
      <span class="hint" id="key-help">
        Kept in this tab until it is closed.
      </span>
    </form>
  );
}
