-- Groups that stages forward from other tasks, their sources: each source is stored once.
--
-- A source is a leased group of another task: its id there, and a digest of its bytes. The hash sources has
-- a field for each origin, a task and a consumer group of it: "<incarnation> <floor> <trimmed>". In this
-- incarnation of the other task all groups up to the id `floor` are deleted, so a put that names one of them
-- comes too late, and is refused. The hash sources:<origin> has a record of each source, by its id there:
-- "<id here> <digest>", with the id 0 if a filter dropped the group. Records up to the id `trimmed` are
-- removed.
-- docs/decisions/0037-stages.md says why no group is stored twice.
--@include task

local MOST_TRIMMED = 200 -- ids that one call looks at

-- Why a put of sources is refused, or nil: {'known'}: one of them is stored; {'past', origin}: they are not
-- of the incarnation, or not above the floor, of this origin. `packed` is {origin, incarnation, floor that
-- the other task says, {id there, ...}, {digest, ...}}: first the groups of the entries, then dropped ones.
local function refused_sources(packed)
  local origin, incarnation, _, ids, digests = unpack(cmsgpack.unpack(packed))
  local row = redis.call('HGET', key('sources'), origin)
  if not row then
    return nil
  end
  local known, floor = string.match(row, '^(%S+) (%d+)')
  if known ~= incarnation then
    return {'past', row}
  end
  local records = redis.call('HMGET', key('sources', origin), unpack(ids))
  for i, record in ipairs(records) do
    if record and string.match(record, '%S+$') == digests[i] then
      return {'known'}
    elseif tonumber(ids[i]) <= tonumber(floor) then
      return {'past', row}
    end
  end
  return nil
end

-- Record the sources of the `count` entries beyond the id `before`, and of dropped groups, and remove a page
-- of old records. What can fail comes before the records.
local function record_sources(packed, before, count)
  local origin, incarnation, floor, ids, digests = unpack(cmsgpack.unpack(packed))
  local row = redis.call('HGET', key('sources'), origin) or ''
  local known, trimmed = string.match(row, '^%S+ (%d+) (%d+)$')
  floor, trimmed = math.max(floor, tonumber(known or '0')), tonumber(trimmed or floor)
  local last, old, records = math.min(floor, trimmed + MOST_TRIMMED), {}, {}
  for id = trimmed + 1, last do
    old[#old + 1] = string.format('%d', id)
  end
  for i, id in ipairs(ids) do
    records[2 * i - 1] = id
    records[2 * i] = string.format('%d %s', i <= count and before + i or 0, digests[i])
  end
  in_parts('HDEL', key('sources', origin), old)
  redis.call('HSET', key('sources'), origin, string.format('%s %d %d', incarnation, floor, last))
  in_parts('HSET', key('sources', origin), records)
end
