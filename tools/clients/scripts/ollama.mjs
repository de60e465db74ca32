// set-up
import { Ollama } from 'ollama';

const { BASE_URL, API_KEY, MODEL } = process.env;
const client = new Ollama({ host: BASE_URL, headers: { Authorization: `Bearer ${API_KEY}` } });
// end
import { readFileSync } from 'node:fs';

const cancel = process.argv[2] === 'cancel';
const parameters = { type: 'object', properties: { path: { type: 'string' } }, required: ['path'] };
const tools = [{ type: 'function', function: { name: 'read_file', description: 'Reads a file.', parameters } }];
const messages = [{ role: 'user', content: process.env.PROMPT }];
let deltas = 0;
try {
  while (messages.at(-1).role !== 'assistant') {
    const said = { role: 'assistant', content: '', tool_calls: [] };
    const stream = await client.chat({ model: MODEL, messages, tools, stream: true });
    for await (const { message } of stream) {
      process.stdout.write(message.content);
      said.content += message.content;
      said.tool_calls.push(...(message.tool_calls ?? []));
      if (cancel && ++deltas === 5) stream.abort();
    }
    messages.push(said);
    for (const { function: call } of said.tool_calls) {
      const content = readFileSync(call.arguments.path, 'utf8');
      messages.push({ role: 'tool', tool_name: call.name, content });
    }
  }
} catch (error) {
  if (!(cancel && error.name === 'AbortError')) throw error;
}
