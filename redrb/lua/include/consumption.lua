-- Notes which rows of a table a task has acknowledged, where the task is one that claims rows: its keys lie
-- below those of the table, and the facts of its groups hold the numbers of their rows.
--@include task facts

local function note_consumed(seqs)
  local home, name = string.match(prefix, '^(.*}:)claims:(.*):$')
  if not home or #seqs == 0 then
    return
  end
  local change, members, noted = redis.call('HGET', home .. 'task', 'change') or '0', {}, {}
  for i, seq in ipairs(seqs) do
    members[i] = member_of(seq)
  end
  for _, facts in ipairs(facts_of_all(members)) do
    for _, row in ipairs(facts and facts.rows or {}) do
      noted[#noted + 1], noted[#noted + 2] = change, row
    end
  end
  in_parts('ZADD', home .. 'consumed:' .. name, noted)
end
