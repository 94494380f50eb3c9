-- Create the task, or check that it has the settings asked for.
-- KEYS[1] stream
-- ARGV    name, value, ...   settings; one that nobody has given yet is taken over
-- Returns {'ok', name, value, ...} with all settings, or {'differs', name, stored, ...}.
--@ _task _waiters _room _tags _index _convert

local NAMES = {'format', 'order', 'limit', 'max_bytes', 'max_deliveries', 'indexed', 'sampled',
  'max_staleness', 'max_token_staleness', 'on_expired', 'max_reads', 'capacity', 'eviction', 'rate',
  'tags', 'keep_ms', 'keep_groups'}

begin_writing()
if not exists() then
  -- an entry that is gone again leaves the last id behind: ids count up from there
  redis.call('DEL', stream)
  redis.call('XADD', stream, BASE .. '0', 'g', '')
  redis.call('XDEL', stream, BASE .. '0')
  redis.call('HSET', task, 'last', '0')
end
local used = number(task, 'put') > 0
local differing, fresh, index = {'differs'}, {}, false
for i = 1, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  local stored = redis.call('HGET', task, name)
  if name == 'indexed' then
    index = not stored
  elseif not stored and used and ((name == 'order' and value ~= 'fifo') or name == 'tags') then
    stored = name == 'order' and 'fifo' or '' -- what waits was put without
  end
  if stored and stored ~= value then
    differing[#differing + 1] = name
    differing[#differing + 1] = stored
  end
  fresh[#fresh + 1], fresh[#fresh + 2] = name, value
end
if #differing > 1 then
  return differing
end
local settings = {'ok'}
for i = 1, #fresh, 2 do
  if fresh[i] ~= 'indexed' then
    redis.call('HSET', task, fresh[i], fresh[i + 1])
  end
end
if index then
  index_all(groups())
end
local stored = redis.call('HMGET', task, unpack(NAMES))
for i, name in ipairs(NAMES) do
  settings[#settings + 1] = name
  settings[#settings + 1] = stored[i]
end
return settings
