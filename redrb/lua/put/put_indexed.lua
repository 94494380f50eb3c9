-- Account for entries that the same transaction has just added to an indexed task, or take them out.
-- Runs in MULTI after n times XADD stream NOMKSTREAM * g <group>.
-- KEYS[1] stream
-- ARGV    producer, operation, samples, filtered, expired, order, by_token, tags, facts
--         of each entry ...
--         operation, granted room: as in `put`; filtered, expired: groups that a filter, their
--         producer held back
--         facts: "<size> <status> <score> <priority> <version> <newest> 0 <samples>"; a score may be 'arrival' or '-arrival'
--         order: that the scores are of; by_token: 1 where the newest tokens were looked at
--         tags: JSON list of the names and of each entry's tag values, or ''
-- Returns what `put` returns, and with 'ok' how many were too stale on arrival. {'indexed'}: made for
--         other settings than those of the task; {'plain'}: run `convert` until it is done
--@include task tags index history room waiters groups convert evict puts

begin_writing()
local known, gone = numbers(task, 'last', 'limit', 'max_bytes', 'bytes', 'kept_bytes', 'put',
  'samples_put', 'bytes_put', 'capacity')
if gone then
  return {'gone'}
end
local before, limit, max_bytes, stored_bytes = known[1], known[2], known[3], known[4]
local producer, operation, filtered = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])
local expired, count = tonumber(ARGV[5]), #ARGV - 8
local last = before + count

local again = done_before(producer, operation)
if again then
  undo(before, count)
  return again
end

-- settings that somebody gave after this producer had opened the task
local values = ARGV[8] ~= '' and cjson.decode(ARGV[8]) or {{}}
if ARGV[6] ~= rules().order or (rules().max_token_staleness and ARGV[7] ~= '1')
  or table.concat(values[1], ' ') ~= table.concat(rules().names, ' ') then
  undo(before, count)
  return {'indexed'}
end

if not is_nearly_indexed(groups()) then
  undo(before, count)
  return {'plain'}
end

local now, bytes, entries = now_ms(), 0, {}
for i = 1, count do
  entries[i] = words(ARGV[8 + i])
  bytes = bytes + tonumber(entries[i][1])
end

-- room
local spi, _, least, most = rate_of()
if (limit > 0 and count > limit) or (max_bytes > 0 and bytes > max_bytes)
  or (spi and count > (most - least) / spi) then
  undo(before, count)
  return {'never'}
end
local left, reserved = -1, reserved_before('#room', producer, now)
if limit > 0 then
  left = limit - stored_groups()
  if left < reserved then
    undo(before, count)
    return {'full', 'limit'}
  end
end
if spi then
  local allowed = inserts_left(known[6]) - count
  if allowed < reserved then
    undo(before, count)
    return {'full', 'rate'}
  end
  left = left < 0 and allowed or math.min(left, allowed)
end
if max_bytes > 0 then
  if stored_bytes - known[5] + bytes > max_bytes then
    undo(before, count)
    return {'full', 'max_bytes'}
  end
  free_history(stored_bytes + bytes - max_bytes)
  for i = 1, count do
    redis.call('HSET', key('sizes'), string.format('%.0f', before + i), entries[i][1])
  end
  add(task, 'bytes', bytes)
end
trim_history(100)

if not rules().indexed then
  arriving = count
  index_all(groups())
end
local told, all = rules(), groups()

-- what is too stale on arrival expires at once
local function is_overdue(facts)
  local version, newest = tonumber(facts[VERSION]), tonumber(facts[NEWEST])
  return told.version and (
    (told.max_staleness and version and told.version - version > told.max_staleness) or
    (told.max_token_staleness and newest and told.version - newest > told.max_token_staleness))
end

local stored, stale_ones, pools, overdue_seqs, facts_args = 0, 0, {}, {}, {}
for i = 1, count do
  local facts, member = entries[i], member_of(before + i)
  local stale = is_overdue(facts) and facts[STATUS] ~= 'expired'
  stale_ones = stale_ones + (stale and 1 or 0)
  if stale and not told.keep then
    overdue_seqs[#overdue_seqs + 1] = before + i
  else
    if stale then
      facts[STATUS] = 'expired'
      facts.note = table.concat({told.version, told.max_staleness or '-',
        told.max_token_staleness or '-'}, ' ')
    end
    if facts[SCORE] == 'arrival' then
      facts[SCORE] = string.format('%.0f', before + i)
    elseif facts[SCORE] == '-arrival' then
      facts[SCORE] = string.format('%.0f', -before - i)
    end
    for _, value in ipairs(intern(told.names, values[i + 1] or {}, true)) do
      facts[#facts + 1] = value
    end
    if told.version then
      facts[#facts + 1] = 'v' .. told.version
    end
    facts_args[#facts_args + 1], facts_args[#facts_args + 2] = member, table.concat(facts, ' ')
    local own = pools[facts[STATUS]] or {members = {}, facts = {}}
    pools[facts[STATUS]] = own
    own.members[#own.members + 1] = member
    own.facts[#own.facts + 1] = facts
    stored = stored + 1
  end
end
in_parts('HSET', key('facts'), facts_args)
delete(overdue_seqs)

count_put(producer, operation, last, count, {known[6], known[7], known[8]}, tonumber(ARGV[3]), bytes,
  filtered)
add(task, 'arrived_stale', #overdue_seqs + expired)
for _, group in ipairs(all) do
  local state = key('group', group)
  for status, own in pairs(pools) do
    enter(group, pool_of(group, status), own.members, own.facts)
    for i, facts in ipairs(own.facts) do
      if facts.note then
        redis.call('HSET', key('expiries', group), own.members[i], facts.note)
      end
    end
  end
  redis.call('HSET', state, 'cursor', string.format('%.0f', last))
  add(state, 'put', count + filtered + expired)
  add(state, 'filtered', filtered)
  add(state, 'expired', #overdue_seqs + expired)
  left_unread(group, overdue_seqs)
  add(state, 'waiting', stored)
end
if known[9] > 0 then -- one that was given later is reached by and by
  evict(math.min(stored_groups() - known[9], 1000 + count), 0)
end
for _, group in ipairs(all) do
  if spi then -- it may let in takes of other statuses too
    wake_pools(group, now)
  else
    for status in pairs(pools) do
      wake_pool(pool_of(group, status), now)
    end
  end
end
dequeue('#room', producer)
wake('#room', room_left(), now)
return {'ok', last, left, stale_ones}
