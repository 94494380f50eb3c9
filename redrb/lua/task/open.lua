-- Create the task, or check that it has these settings. Removes old records of producers.
-- KEYS[1] stream
-- ARGV    the call `Open` of redrb/stream/task/calls.py
-- Returns its reply
--@include task settings producers misfits changing unrecorded permissions

check_permissions(KEYS[1])
begin_writing()
refuse_lost_settings()
local ask = cmsgpack.unpack(ARGV[1])
if not ask.create and not exists() then
  return cmsgpack.pack({outcome = 'unknown'})
end
check_puts()
local generation = ask.generation
local stored_incarnation = redis.call('HGET', task, 'incarnation')
if stored_incarnation and stored_incarnation == ask.incarnation then
  remove_records(server_ms())
  return all_settings()
end
local created, rebuilt = not exists(), redis.call('HEXISTS', task, 'rebuilt') == 1
local used = number(puts, 'put') > 0 and not rebuilt
local differing, values, implied = {}, {}, noted_settings('implied')
local configured, held, learned = noted_settings('configured'), {}, {}
local known = tonumber(redis.call('HGET', task, 'generation') or '')

-- The value that the task has without being given one: false if it may be given any.
local function unwritten(name, value)
  if used and ((name == 'order' and value ~= 'fifo') or name == 'tags') then
    return name == 'order' and 'fifo' or '' -- groups were put without
  end
end

local function give(name, value)
  if value == '' then -- it was removed
    if (generation or 0) > (known or math.huge) then
      values[name] = false
    end
    return
  end
  local stored = redis.call('HGET', task, name) or unwritten(name, value)
  local newer = (generation or 0) > (known or math.huge) and not needs_empty(name, value)
  if configured[name] and stored ~= value and not newer then
    held[#held + 1] = name
  elseif not stored or stored == value or implied[name] or newer then
    values[name], implied[name] = value, nil
  elseif (generation or math.huge) >= (known or 0) then
    differing[name] = stored
  end
end

for _, name in ipairs(ask.configured) do
  learned[name] = true
end
for _, given in ipairs({ask.given, ask.implied}) do
  for name, value in pairs(given) do
    if given == ask.given or learned[name] then
      give(name, value)
    end
    if learned[name] and (generation or 0) >= (known or 0) then
      configured[name] = true
    end
  end
end
for name, value in pairs(ask.implied) do
  local free = implied[name] or not configured[name] and redis.call('HEXISTS', task, name) == 0
  if free and not learned[name] and not values[name] then
    values[name], implied[name] = value ~= '' and value, value ~= '' or nil
    if needs_empty(name, values[name]) then
      differing[name] = redis.call('HGET', task, name) or 'fifo'
    end
  end
end
if next(differing) then
  return cmsgpack.pack({outcome = 'differs', settings = differing})
end
local refused = misfit(values)
if refused then
  return cmsgpack.pack(refused)
end
if values.order then
  redis.call('HDEL', task, 'rebuilt')
end
if created then
  -- an entry that was deleted leaves its id behind: ids count up from there
  redis.call('DEL', stream)
  redis.call('XADD', stream, BASE .. '0', 'g', '')
  redis.call('XDEL', stream, BASE .. '0')
  redis.call('HSET', puts, 'last', '0')
end
redis.call('HSETNX', task, 'incarnation', ask.revision)
local added = created
for name, value in pairs(ask.defaults) do
  added = redis.call('HSETNX', task, name, value) == 1 or added
end
if generation and (created or known) then
  redis.call('HSET', task, 'generation', math.max(generation, known or 0))
end
note_settings('implied', implied)
note_settings('configured', configured)
if not change(values, ask.revision, ask.who) and added then
  redis.call('HSET', task, 'revision', ask.revision)
  pack_rules()
end
remove_records(server_ms())
return all_settings(held)
