-- Create the task, or check that it has the settings asked for.
-- KEYS[1] stream
-- ARGV    name, value, ...   settings; one that nobody has given yet is taken over
-- Returns {'ok', name, value, ...} with all settings, or {'differs', name, stored, ...}.
--@ _task

begin_writing()
if not exists() then
  -- an entry that is gone again leaves the last id behind: ids count up from there
  redis.call('DEL', stream)
  redis.call('XADD', stream, BASE .. '0', 'g', '')
  redis.call('XDEL', stream, BASE .. '0')
  redis.call('HSET', task, 'last', '0')
end
local differing = {'differs'}
for i = 1, #ARGV, 2 do
  local stored = redis.call('HGET', task, ARGV[i])
  if stored and stored ~= ARGV[i + 1] then
    differing[#differing + 1] = ARGV[i]
    differing[#differing + 1] = stored
  end
end
if #differing > 1 then
  return differing
end
local settings = {'ok'}
for i = 1, #ARGV, 2 do
  redis.call('HSET', task, ARGV[i], ARGV[i + 1])
end
for _, name in ipairs({'format', 'order', 'limit', 'max_bytes', 'max_deliveries'}) do
  settings[#settings + 1] = name
  settings[#settings + 1] = redis.call('HGET', task, name)
end
return settings
