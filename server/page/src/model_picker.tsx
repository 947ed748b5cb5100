// The choice among the names of the server's models, with their state where models are loaded on demand.
import type { Server } from './server';
import type { ServedModel } from './types';

export function ModelPicker({ server, onChange }: { server: Server; onChange: (name: string) => void }) {
  const { chosen, models, state, text } = server;
  if (models.length < 2 || state !== 'ready') return <>{text}</>;
  return (
    <>
      <select
        class="model"
        aria-label="Model"
        value={chosen!.id}
        onChange={(event) => onChange(event.currentTarget.value)}
      >
        {models.map((model) => (
          <option key={model.id} value={model.id}>
            {labelOf(model)}
          </option>
        ))}
      </select>
      {chosen!.status?.value === 'failed' && <span class="bad">{chosen!.status.reason ?? 'It cannot be loaded.'}</span>}
    </>
  );
}

function labelOf({ id, parent, status }: ServedModel): string {
  if (parent) return `${id}, adapter of ${parent}`;
  switch (status?.value) {
    case 'unloaded':
      return `${id}, not loaded`;
    case 'loading':
      return `${id}, loading${status.progress ? `: ${status.progress}` : ''}`;
    case 'failed':
      return `${id}, failed`;
    default:
      return id;
  }
}
