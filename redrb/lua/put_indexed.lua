-- Account for entries that the same transaction has just added to an indexed task, or take them out.
-- Runs in MULTI after n times XADD stream NOMKSTREAM * g <group>.
-- KEYS[1] stream
-- ARGV    producer, operation, samples, filtered, expired, order, tags, facts
--         of each entry ...
--         operation, granted room: as in `put`; filtered, expired: groups that a filter, their
--         producer held back
--         facts: "<size> <status> <score> <priority> <version> <newest> 0 <samples>"; a score may be 'arrival' or '-arrival'
--         order: that the scores are of; tags: JSON list of each entry's tag values, or ''
-- Returns what `put` returns, and with 'ok' how many were too stale on arrival
--@ _task _waiters _room _tags _index _convert _groups _expire _evict

begin_writing()
local known, gone = numbers(task, 'last', 'limit', 'max_bytes', 'bytes', 'put', 'samples_put',
  'bytes_put', 'capacity')
if gone then
  return {'gone'}
end
local before, limit, max_bytes, stored_bytes = known[1], known[2], known[3], known[4]
local producer, operation, filtered = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])
local expired, count = tonumber(ARGV[5]), #ARGV - 7
local last = before + count

local function undo()
  for seq = before + 1, last do
    redis.call('XDEL', stream, id_of(seq))
  end
  redis.call('HSET', task, 'last', string.format('%.0f', last))
end

local earlier = redis.call('HGET', key('producers'), producer)
if earlier then
  local done, at, entries = string.match(earlier, '^(%d+) (%d+) (%d+)$')
  if tonumber(done) >= operation then
    undo()
    return {'again', tonumber(at), tonumber(entries)}
  end
end

-- settings that somebody gave after this producer had opened the task
if ARGV[6] ~= rules().order or (#rules().names > 0 and ARGV[7] == '') then
  undo()
  return {'indexed'}
end

local now, bytes, entries = now_ms(), 0, {}
for i = 1, count do
  entries[i] = words(ARGV[7 + i])
  bytes = bytes + tonumber(entries[i][1])
end

-- room
local spi, _, least, most = rate_of()
if (limit > 0 and count > limit) or (max_bytes > 0 and bytes > max_bytes)
  or (spi and count > (most - least) / spi) then
  undo()
  return {'never'}
end
local left, reserved = -1, reserved_before('#room', producer, now)
if limit > 0 then
  left = limit - stored_groups()
  if left < reserved then
    undo()
    return {'full', 'limit'}
  end
end
if spi then
  local allowed = inserts_left(known[5]) - count
  if allowed < reserved then
    undo()
    return {'full', 'rate'}
  end
  left = left < 0 and allowed or math.min(left, allowed)
end
if max_bytes > 0 then
  if stored_bytes + bytes > max_bytes then
    undo()
    return {'full', 'max_bytes'}
  end
  for i = 1, count do
    redis.call('HSET', key('sizes'), string.format('%.0f', before + i), entries[i][1])
  end
  add(task, 'bytes', bytes)
end

if not rules().indexed then
  index_all(groups())
end
local told, all = rules(), groups()
local values = ARGV[7] ~= '' and cjson.decode(ARGV[7])

-- what is too stale on arrival expires at once
local function is_overdue(facts)
  local version, newest = tonumber(facts[VERSION]), tonumber(facts[NEWEST])
  return told.version and (
    (told.max_staleness and version and told.version - version > told.max_staleness) or
    (told.max_token_staleness and newest and told.version - newest > told.max_token_staleness))
end

local stored, pools, overdue_seqs, facts_args = 0, {}, {}, {}
for i = 1, count do
  local facts, member = entries[i], member_of(before + i)
  local stale = is_overdue(facts) and facts[STATUS] ~= 'expired'
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
    if values then
      for _, value in ipairs(intern(told.names, values[i], true)) do
        facts[#facts + 1] = value
      end
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

redis.call('HSET', key('producers'), producer,
  string.format('%.0f %.0f %.0f', operation, last, count))
redis.call('HSET', task, 'last', string.format('%.0f', last),
  'put', string.format('%.0f', known[5] + count),
  'samples_put', string.format('%.0f', known[6] + tonumber(ARGV[3])),
  'bytes_put', string.format('%.0f', known[7] + bytes))
add(task, 'filtered', filtered)
add(task, 'arrived_stale', #overdue_seqs)
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
  left_unread(group, #overdue_seqs)
  add(state, 'waiting', stored)
end
if known[8] > 0 then
  evict(stored_groups() - known[8], 0)
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
return {'ok', last, left, #overdue_seqs}
