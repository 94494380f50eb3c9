-- Create the task, or check that it has these settings. Removes old records of producers.
-- KEYS[1] stream
-- ARGV    revision, create, name, value, ...
--         revision: random name of the settings, if this call changes them, and of the incarnation of the
--         task, if this call creates it
--         create: 1 to create a task that does not exist, else 0
--         a setting that the task was not given yet is added to it; default_<name>: value of a setting
--         until it is given, kept from the first call
-- Returns {'ok', name, value, ..., 'epoch', epoch, 'filling', place or nil} with all settings and the
--         epoch of the producers' records; if there is a place, run task/fill until it is done
--       | {'unknown'}: there is no such task, and it is not to be created
--       | {'differs', name, stored value, ...}
--       | {'unversioned'}: it is to evict the stalest groups, and indexes no versions
--       | {'blocked', name, value, groups, 1 or 0}: the limit or capacity is smaller than the groups that a
--         first take needs by the rate: takes and puts would wait for each other; groups is 0 if the rate
--         leaves groups unread, which fill any limit at last; 1: this call gives the limit
--       | {'excluded', name, value}: with groups_per_version the task cannot have this setting
--@include task facts filling settings producers permissions

check_permissions(KEYS[1])
begin_writing()
if ARGV[2] == '0' and not exists() then
  return {'unknown'}
end
local used = number(puts, 'put') > 0
local differing, given, changed, fill = {'differs'}, {}, false, false
for i = 3, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  local stored = redis.call('HGET', task, name)
  if string.sub(name, 1, 8) == 'default_' then
    value = stored or value
  elseif not stored and used and ((name == 'order' and value ~= 'fifo') or name == 'tags') then
    stored = name == 'order' and 'fifo' or '' -- groups were put without
  elseif not stored and name == 'partitions' and exists() then
    stored = '1' -- the task was created without partitions
  elseif not stored and (name == 'max_staleness' or name == 'max_token_staleness') then
    fill = true
  end
  if stored and stored ~= value then
    differing[#differing + 1] = name
    differing[#differing + 1] = stored
  end
  given[name], changed = value, changed or not stored
end
if not given.partitions and redis.call('HEXISTS', task, 'partitions') == 1 then
  differing[#differing + 1] = 'partitions'
  differing[#differing + 1] = redis.call('HGET', task, 'partitions')
end
if #differing > 1 then
  return differing
end
local function setting(name)
  return given[name] or redis.call('HGET', task, name)
end
if given.eviction == 'stalest' and setting('order') ~= 'stalest'
  and not setting('max_staleness') then
  return {'unversioned'}
end
local spi, size, least = string.match(setting('rate') or '', '^(%S+) (%S+) (%S+)')
if spi then
  spi, size, least = tonumber(spi), tonumber(size), tonumber(least) or -math.huge
  local reads = tonumber(setting('max_reads') or setting('default_max_reads') or '1')
  for _, name in ipairs({'limit', 'capacity'}) do
    local most, needed = tonumber(setting(name) or '0'), size
    if least > -1e15 and (name == 'limit' or reads > 0) then
      needed = math.max(needed, math.ceil((least + 1) / spi - 1e-6))
    end
    if name == 'limit' and least > -1e15 and spi < reads then
      needed = 0
    end
    if most > 0 and (needed == 0 or needed > most) then
      return {'blocked', name, most, needed, given[name] and 1 or 0}
    end
  end
end
if setting('groups_per_version') then
  for name, only in pairs({capacity = false, partitions = false, max_reads = '1'}) do
    local value = setting(name)
    if value and value ~= only then
      return {'excluded', name, value}
    end
  end
end
if not exists() then
  -- an entry that was deleted leaves its id behind: ids count up from there
  redis.call('DEL', stream)
  redis.call('XADD', stream, BASE .. '0', 'g', '')
  redis.call('XDEL', stream, BASE .. '0')
  redis.call('HSET', puts, 'last', '0')
end
if redis.call('HSETNX', task, 'incarnation', ARGV[1]) == 1 then
  changed = true
end
for name, value in pairs(given) do
  if name == 'max_bytes' and not redis.call('HGET', task, name) then
    redis.call('HSET', task, 'sized_after', number(puts, 'last'))
  end
  redis.call('HSET', task, name, value)
end
if changed then
  redis.call('HSET', task, 'revision', ARGV[1])
  pack_rules()
  if given.groups_per_version and redis.call('EXISTS', key('queue', '#admission')) == 1 then
    --@include admission
    known_rules = nil
    if rules().max_staleness then
      wake_rights()
    end
  end
end
if fill and used then
  redis.call('HSET', task, 'filling', '0')
  fill_versions()
end
remove_records(server_ms())
local settings = {'ok'}
local stored = redis.call('HMGET', task, unpack(SETTINGS))
for i, name in ipairs(SETTINGS) do
  settings[#settings + 1] = name
  settings[#settings + 1] = stored[i]
end
settings[#settings + 1] = 'epoch'
settings[#settings + 1] = redis.call('HGET', puts, 'epoch') or '0'
settings[#settings + 1] = 'filling'
settings[#settings + 1] = redis.call('HGET', task, 'filling')
return settings
